"""F7, F37, P9: four gloo processes save with DCP; others, fewer of them and plain ones load it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.dcp import ranks
from tests.servers.nursery import NURSERY, QUICK

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import strangers, verify
from holdfast.objectstore.directory import DirectoryStore

ROOT = Path(__file__).parents[3]
WAIT_S = 240


def together(action, folder, world):
    """Run it on so many ranks; all must end well, none outlives the test."""
    (folder / "rendezvous").unlink(missing_ok=True)
    environ = {"PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    arguments = [[action, str(folder), str(rank), str(world)] for rank in range(world)]
    script = Path(__file__).with_name("ranks.py")
    NURSERY.together(script, arguments, env=environ, folder=folder, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What four ranks have saved over FSDP2: once more, cached, in the background, and ours."""
    folder = tmp_path_factory.mktemp("world")
    together("save", folder, 4)
    return folder


@pytest.mark.slow
def test_a_process_of_torchs_own_saves(tmp_path):
    """F7: the writer is pickled to it, and nothing that it learns there comes back."""
    script = Path(__file__).parent / "ranks.py"
    environ = {
        **os.environ, "PYTHONPATH": f"{QUICK}:{ROOT / 'sdk'}", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, script, "process", tmp_path, str(rank), "2"],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in started:
            said, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fewer_ranks_load_what_four_saved_bit_for_bit(saved, world):
    """F7: and a save in which a rank had failed has changed nothing."""
    together("load", saved, world)


def test_each_rank_has_written_its_part_and_every_byte_is_verified(saved):
    """F37"""
    folder = CheckpointFolder(DirectoryStore(saved / ranks.SHRUNK))
    manifest = folder.manifest()
    held = [{entry.spec.fqn for entry in folder.header(s).entries} for s in manifest.shards]

    assert [0, 1, 2, 3, 4] == [shard.id.volume for shard in manifest.shards]
    assert all(verdict.ok for verdict in verify(folder, manifest))
    assert () == strangers(folder, manifest)
    assert all("model.0.weight" in names for names in held[:4])
    assert 1 == sum("plain" in names for names in held)


def test_holdfast_load_reads_it_whole(saved):
    state = {}
    holdfast.load(saved / ranks.SHRUNK, state)

    assert ranks.same(torch.load(saved / "expected.pt"), state)
