"""Worlds of gloo processes save and load one folder; plain PyTorch reads it too (P7, F73)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.oneshot.ranks import ASTRAL, SAVED_WORLD, Net, tensors
from tests.servers.nursery import NURSERY

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import strangers, verify
from holdfast.objectstore.directory import DirectoryStore

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WAIT_S = 240


def together(commands):
    """Run one process per command side by side; all must end well, none outlives the test."""
    started = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        for process in started:
            said, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ranks(action, folder, store, world_size):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    environ = {"PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    arguments = [
        [action, str(folder), str(store), str(rank), str(world_size)] for rank in range(world_size)
    ]
    NURSERY.together(HERE / "ranks.py", arguments, env=environ, folder=folder, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks with a real model and optimizer, and what was in it."""
    folder = tmp_path_factory.mktemp("world")
    ranks("save", folder, folder / "final", SAVED_WORLD)
    return folder


def test_two_ranks_write_one_whole_checkpoint_and_share_the_work(saved):
    folder = CheckpointFolder(DirectoryStore(saved / "final"))
    manifest = folder.manifest()
    held = [{entry.spec.fqn for entry in folder.header(s).entries} for s in manifest.shards]

    assert (SAVED_WORLD, {"steps": 3}) == (manifest.world_size, manifest.notes)
    assert all(verdict.ok for verdict in verify(folder, manifest))
    assert () == strangers(folder, manifest)
    assert not held[0] & held[1]
    assert all(any(fqn.startswith("model.") for fqn in names) for names in held)


def test_a_bigger_world_loads_it_bit_for_bit(saved):
    ranks("load", saved, saved / "final", 3)


def test_one_process_without_a_process_group_loads_it_bit_for_bit(saved):
    """No DDP here, DDP there: names are the same."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "extra": {"rank": 9, "own": torch.zeros(2)}}
    holdfast.load(saved / "final", state)
    expected = torch.load(saved / "expected.pt")
    found = tensors(state)

    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {"rank": 0, "own": [0.0, 0.0]} == {
        "rank": state["extra"]["rank"],
        "own": state["extra"]["own"].tolist(),
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_plain_pytorch_reads_a_copy_of_the_folder_on_another_world_size(
    saved, tmp_path, world_size
):
    """THE test of P7: HuggingFaceStorageReader, DTensors cut anew, and no Holdfast to import."""
    copy = tmp_path / "copy"
    shutil.copytree(saved / "final", copy)
    together(
        [
            [
                *(sys.executable, "-I", HERE / "plain.py", copy, saved / "expected.pt"),
                *(tmp_path / "rendezvous", str(rank), str(world_size)),
            ]
            for rank in range(world_size)
        ]
    )


@pytest.mark.parametrize(
    ("number", "said"), [(0, "'extra.bad'"), (1, ASTRAL[:100]), (2, "pass a dict")]
)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_the_checkpoint_that_was_there(
    saved, number, said
):
    """Defects A3, C3: named on all ranks, whatever the text; a long one kept a rank away from the
    exchange, and the others waited for the process group's timeout."""
    errors = [
        json.loads((saved / f"error-{number}-{rank}.json").read_text())
        for rank in range(SAVED_WORLD)
    ]

    assert ["invalid_request", "invalid_request"] == [kind for kind, _ in errors]
    assert said in errors[1][1]
    assert "rank 1 failed: InvalidRequestError: " in errors[0][1]
    assert said in errors[0][1]


def test_ranks_that_do_not_have_the_same_tensors_in_common_are_named(saved):
    """F38: each rank shares out what it has; a checkpoint would lack what none of them saved."""
    errors = [json.loads((saved / f"error-3-{rank}.json").read_text()) for rank in range(2)]

    assert all("ranks 0 and 1 do not have the same tensors in common" in said for _, said in errors)
