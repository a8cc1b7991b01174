"""What a single process has saved is exported under the names of its state, and comes in again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.convert.test_import import load, taken_in
from torch import nn

import holdfast
from holdfast.cli.main import main
from holdfast.convert.exporting import FORMATS
from holdfast.convert.importing import open_source

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")


@pytest.fixture
def state():
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return {"model": model.state_dict(), "seen": {"tokens": torch.arange(4)}, "epoch": 3}


def exported(state, tmp_path: Path, form: str, capsys) -> Path:
    """Save by path, and export with all that there is."""
    holdfast.save(tmp_path / "saved", state)
    dest = tmp_path / ("out.safetensors" if form == "safetensors" else "out")
    assert 0 == main(["export", str(tmp_path / "saved"), str(dest), "--format", form])
    assert "groups of ranks" not in capsys.readouterr().out
    return dest


@pytest.mark.parametrize("form", FORMATS)
def test_plain_tensors_of_one_process_have_the_names_of_the_state(form, state, tmp_path, capsys):
    source = open_source(exported(state, tmp_path, form, capsys))
    names = {spec.fqn for spec in source.specs()}

    assert {"model.weight", "model.bias", "seen.tokens"} == {n for n in names if ".rng" not in n}


def test_another_tool_reads_them_by_these_names(state, tmp_path, capsys):
    found = load_file(exported(state, tmp_path, "safetensors", capsys))

    assert torch.equal(state["model"]["weight"], found["model.weight"])
    assert torch.equal(state["seen"]["tokens"], found["seen.tokens"])


@pytest.mark.parametrize("form", FORMATS)
def test_the_import_is_the_same_state_again(form, state, store, tmp_path, capsys):
    dest = exported(state, tmp_path, form, capsys)
    here = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "seen": {"tokens": torch.zeros(4, dtype=torch.int64)},
        "epoch": 0,
    }
    load(taken_in(store, open_source(dest)), tmp_path / "store", here)

    assert torch.equal(state["model"]["weight"], here["model"]["weight"])
    assert torch.equal(state["seen"]["tokens"], here["seen"]["tokens"])
    assert 3 == here["epoch"]
