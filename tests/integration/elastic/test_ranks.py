"""Elastic training on several ranks, all of it in one launch of four processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.servers.nursery import NURSERY

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[3]
RANKS_COUNT = 4
SAMPLES = 66
WAIT_S = 540


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("elastic")
    environ = {
        "PYTHONPATH": str(ROOT / "sdk"),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).with_name("ranks.py")
    arguments = [[str(folder), str(rank)] for rank in range(RANKS_COUNT)]
    NURSERY.together(script, arguments, env=environ, folder=folder, timeout_s=WAIT_S)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS_COUNT)]


@pytest.mark.parametrize(
    "setting", ["ddp 16 1", "ddp 10 1", "ddp 16 2", "fsdp 16 1", "fsdp 16 2", "hsdp 16 1"]
)
def test_updates_and_noise_are_those_of_whole_batches(found, setting):
    """F83, F84: kind, batch, micro-batches; also a batch that four ranks share unequally."""
    for rank in found:
        of = rank[setting]

        assert of["differs"] < 1e-6
        assert of["sqr"] == pytest.approx(0, abs=1e-4)
        assert of["var"] == pytest.approx(0, abs=1e-4)
        assert not of["biased"]
        assert of["state"] == found[0][setting]["state"], "the same to the bit on all ranks"


def test_sums_are_those_of_all_ranks_whatever_names_they_have(found):
    """F82."""
    expected = {"all": 16.0, "of 0": 0.0, "of 1": 2.0, "of 2": 4.0, "of 3": 6.0}

    assert [expected] * RANKS_COUNT == [rank["summed"] for rank in found]


def test_all_ranks_take_the_batch_that_one_has_chosen(found):
    """Each has measured other times, and would choose another one."""
    assert len({tuple(rank["agreed_on"]) for rank in found}) == 1
    assert found[0]["agreed_on"][0] > 16


def test_what_cannot_be_is_refused_on_each_rank(found):
    for rank in found:
        few, whole = rank["refused"]

        assert "a batch of 3 cannot be divided among 4 ranks" in few
        assert "Sequential is not sharded" in whole


@pytest.mark.parametrize("sharded", [False, True])
def test_four_ranks_go_on_with_the_same_bits(found, sharded):
    """P2: DDP and FSDP2, two micro-batches, averages and sums too."""
    assert [True] * RANKS_COUNT == [rank[f"same_bits {sharded}"] for rank in found]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pass_is_gone_on_with_on_other_numbers_of_ranks(found, sharded):
    """F81, F82: 4, 1, 3 ranks under DDP, 4, 2, 4 with shards: each sample once, and so the sums."""
    stages = [rank[f"ranks_changed {sharded}"] for rank in found]
    seen = [sample for rank in stages for sample in rank["seen"]]

    assert sorted(seen) == list(range(SAMPLES))
    assert stages[0]["ends"] == [[24.0, 2, 2.0], [36.0, 3, 3.0], [66.0, 6, 5.5]]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "fixed", "scaled"), [("classifier", 1e-4, 0.12), ("transformer", 1e-3, 0.02)]
)
def test_trainings_end_alike_on_one_two_and_four_ranks(found, kind, ranks, fixed, scaled):
    """F83: at one batch size, and at one that grows with the ranks, by fewer updates."""
    loss, progress, updates = found[0][f"{kind} 1 fixed"]
    same_loss, _, same_updates = found[0][f"{kind} {ranks} fixed"]
    grown_loss, grown_progress, grown_updates = found[0][f"{kind} {ranks} scaled"]

    assert same_loss == pytest.approx(loss, rel=fixed)
    assert same_updates == updates
    assert grown_loss == pytest.approx(loss, rel=scaled)
    assert progress <= grown_progress < progress + ranks
    assert grown_updates < updates * {2: 0.65, 4: 0.45}[ranks]
