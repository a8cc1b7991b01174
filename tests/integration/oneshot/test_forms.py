"""One call saves a model on each mesh, in each form that it can have there (F11, F18)."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.integration.oneshot.forms import KINDS, WORLD, check, plain, tensors
from tests.servers.nursery import NURSERY
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast.cli.main import main

HERE = Path(__file__).parent
WAIT_S = 480

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*single process:UserWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each kind: four ranks have trained, saved, loaded and compared it.

    Defect: the steps of a layer beside the plan of tensor parallelism were compared by the box of
    its weight, where DDP's ranks take what two groups have saved.
    """
    folder = tmp_path_factory.mktemp("forms")
    environ = {
        "PYTHONPATH": str(HERE.parents[2] / "sdk"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"
    }  # fmt: skip
    arguments = [[str(folder), str(rank)] for rank in range(WORLD)]
    NURSERY.together(HERE / "forms.py", arguments, env=environ, folder=folder, timeout_s=WAIT_S)
    return folder


@pytest.mark.parametrize(("mesh", "form"), KINDS)
def test_a_plain_model_takes_what_each_form_on_each_mesh_has_saved(saved, mesh, form):
    """By plain names; the ranks have loaded it before, each into the next mesh, too."""
    model = plain()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    holdfast.load(saved / f"{mesh} {form}", state)

    check(torch.load(saved / f"{mesh} {form}.pt"), tensors(state), f"{mesh} {form}")


@pytest.mark.parametrize(
    ("mesh", "form"), [kind for kind in KINDS if kind[0].startswith(("fsdp1", "zero"))]
)
def test_what_flat_parameters_became_goes_out_to_other_tools(saved, tmp_path, mesh, form):
    """F89, by the command line: Hugging Face's folder, torch's file, and DCP's, which it loads.

    What FSDP1 ignores each rank has saved, with the same bits: that is one tensor.
    """
    name = f"{mesh} {form}"
    expected = torch.load(saved / f"{name}.pt")

    def export(dest, kind, *more):
        command = ["export", str(saved / name), str(tmp_path / dest), "--format", kind, *more]
        assert main(command) == 0

    export("hf", "hf", "--only", "model", "--strip", "model")
    export("all.pt", "torch", "--only", "model", "--only", "optimizer")
    export("dcp", "dcp", "--only", "model", "--only", "optimizer")

    weights = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    of_model = {key: value for key, value in expected.items() if key.startswith("model.")}
    check(of_model, {f"model.{key}": value for key, value in weights.items()}, "hf")
    check(expected, torch.load(tmp_path / "all.pt", weights_only=True), "torch")
    loaded = {key: torch.full_like(value, -1) for key, value in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check(expected, loaded, "dcp")
