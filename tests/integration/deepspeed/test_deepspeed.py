"""DeepSpeed with Holdfast in its plug: real engines on CPU, forked by one process (F9, F10)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.servers.nursery import QUICK

import holdfast
from holdfast.cli.main import main as holdfast_main

HERE = Path(__file__).parent
STAGES = (1, 2, 3)

pytestmark = pytest.mark.timeout(900)  # many engines in a row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("deepspeed")
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(base / "extensions"),
           "PYTHONPATH": f"{QUICK}:{HERE.parents[2] / 'sdk'}"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "scenarios.py"), str(base)],
        env=env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return base


@pytest.fixture(scope="module")
def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_what_steps_write_is_copied_after_the_call_and_the_next_step_waits(report, stage):
    """S1: what is loaded is compared with what was there at the call."""
    assert report[f"waited {stage}"]
    assert [] == report[f"same {stage}"]


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bit_identical_with_the_same_ranks(report, stage):
    assert [] == report[f"same {stage}"]
    assert [3, [1], True, 1, 2] == report[f"client {stage}"]
    assert [] == report[f"later {stage}"]


@pytest.mark.parametrize(
    ("saved", "stage", "size"),
    [(1, 3, 3), (2, 2, 3), (3, 1, 3), (3, 3, 3), (2, 3, 4), (3, 2, 4), (1, 2, 1), (3, 3, 1)],
)
def test_any_stage_and_degree_loads_any_other(report, saved, stage, size):
    """Two ranks saved; master weights, moments, steps, weights, schedule: bit for bit (F10)."""
    assert [] == report[f"elastic {saved}->{stage} on {size}"]


@pytest.mark.parametrize("kind", ["stage 0", "offload 2", "offload 3", "loss scaler", "fp32"])
def test_other_kinds_of_engines_are_saved_and_loaded(report, kind):
    assert [] == report[kind]


def test_a_loss_scaler_comes_back_as_it_was(report):
    assert ["1", "0"] == [report["the scaler"][k] for k in ("cur_iter", "last_overflow_iter")]


def test_the_engine_has_all_methods_of_the_installed_version(report):
    named, unlike, abstract = report["methods"]

    assert [] == unlike
    assert {"create", "save", "load", "commit"} == set(abstract) <= set(named)
    assert ["HoldfastCheckpointEngine", True, True, None, None, True, False, None] == (
        report["answers"]
    )
    assert "is no file of a checkpoint" in report["not a file"]


def test_one_engine_is_given_holdfast_after_it_was_initialized(report):
    assert "TorchCheckpointEngine" == report["its own"]
    assert [] == report["after initialize"]


def test_a_checkpoint_of_deepspeeds_own_is_refused_and_not_unpickled(report):
    assert "is a pickle and is not read" in report["a pickle"]


def test_all_ranks_load_the_same_save_where_another_takes_its_place_meanwhile(report):
    """Else each would have its part of the optimizer from another one, and nobody would know."""
    assert [] == report["one for all"]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_16_bit_weights_are_written_as_a_file_of_torch(report, stage):
    assert [] == report[f"bit16 {stage}"]


def test_a_failed_save_stops_nobody_and_latest_stays(report):
    """P4: all ranks hear why; the next save works, also over one that is there."""
    assert "deepspeed.engine.odd" in report["why"]
    assert "good" == report["latest"]
    assert [False, False] == report["no manifest"]
    assert "no whole checkpoint" in report["torn"]
    assert "next" == report["goes on"]
    assert [] == report["after a failure"]


def test_a_failure_is_raised_once_and_the_save_after_it_goes_through(report):
    assert [True, False] == report["raised"]


def test_a_script_may_leave_its_folder_while_a_save_is_written(report):
    assert report["left"]


def test_a_save_is_left_out_where_the_one_before_does_not_end(report):
    """P4: no rank stops; the save after it is a checkpoint."""
    assert ["next"] == report["after one that hung"]


def test_what_is_not_supported_is_refused_by_initialize(report):
    assert "does not support elastic_checkpoint" in report["elastic config"]
    assert "was saved without ZeRO" in report["no zero"]
    assert "'blocks', which are neither" in report["odd state"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("saved", [1, 3])
@pytest.mark.parametrize("argument", ["load_module_only", "load_optimizer_states"])
def test_stage_3_loads_weights_without_the_state_of_the_optimizer(report, argument, saved, size):
    """DeepSpeed itself loads none, and says nothing; the master weights are the weights then."""
    assert [] == report[f"{argument} {saved} on {size}"]


def test_ranks_hear_at_once_that_rank_0_cannot_write(report):
    """P4: a folder that is none, and a full disk; training goes on, and the next save works."""
    assert "rank 0 failed" in report["blocked"]
    assert "NotADirectoryError" in report["blocked"]
    assert "rank 0 failed: ExhaustedError: no space" in report["full"]
    assert "next" == report["after a full disk"]


def test_deepspeeds_script_for_pickles_is_not_copied_beside_ours(report):
    assert [] == report["scripts"]


def test_a_value_that_is_one_for_all_is_refused_where_it_is_not(report):
    """A restore would give all the one that was saved."""
    assert "ranks 0 and 1 differ in 'scalars.seen'" in report["differ rank"]
    assert "ranks 0 and 1 differ in 'groups.d'" in report["differ group"]
    assert "different values as 'seen' for parts of one group" in report["differ part"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_an_ordinary_one_with_names_and_true_shapes(folder, stage, tmp_path):
    checkpoint = folder / f"stage{stage}" / "global_step3"
    truth = torch.load(folder / f"truth{stage}", weights_only=False)
    state = {}

    holdfast.load(checkpoint, state)
    assert 0 == holdfast_main(
        ["export", str(checkpoint), str(tmp_path / "out.safetensors"), "--format", "safetensors"]
    )

    assert torch.equal(truth["weights.inner.weight"], state["module"]["inner.weight"])
    assert torch.equal(truth["fp32.outer.weight"], state["optimizer"]["fp32"]["outer.weight"])
    assert torch.equal(truth["exp_avg.embed.weight"], state["optimizer"]["exp_avg"]["embed.weight"])
    assert torch.equal(truth["weights.frozen.weight"], state["module"]["frozen.weight"])


def test_nothing_that_is_stored_is_a_pickle(folder):
    """P9: DeepSpeed's own names are empty files, which it looks for."""
    found = [p for n in STAGES for p in (folder / f"stage{n}" / "global_step3").iterdir()]

    assert {p.stat().st_size for p in found if p.suffix == ".pt"} == {0}
    assert {p.suffix for p in found} <= {".pt", ".json", ".safetensors", ".sum"}


@pytest.mark.parametrize("order", ["before", "after", "twice"])
def test_install_works_before_and_after_deepspeed_is_imported_and_twice(order, tmp_path):
    """Each in a fresh process; the last call says what a failure does."""
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = subprocess.run(
        [sys.executable, str(HERE / "installs.py"), str(tmp_path), order],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]

    assert json.loads(done.stderr.splitlines()[-1]) == {
        "known": False, "engine": "HoldfastCheckpointEngine",
        "on_failure": "warn" if order == "before" else "raise",
        "saves": 1, "differences": [], "pickles": [],
    }  # fmt: skip
