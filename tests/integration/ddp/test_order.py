"""DDP goes on in the order of sums that the run had, however many ranks there are (G9, issue 7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.ddp.ranks import CASES, SAVED_AT
from tests.servers.nursery import NURSERY

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[3]
RANKS_COUNT = 4
WAIT_S = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the ranks found, all cases in one launch."""
    folder = tmp_path_factory.mktemp("ddp")
    environ = {
        "PYTHONPATH": str(ROOT / "sdk"),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).with_name("ranks.py")
    arguments = [[str(folder), str(rank), str(RANKS_COUNT)] for rank in range(RANKS_COUNT)]
    NURSERY.together(script, arguments, env=environ, folder=folder, timeout_s=WAIT_S)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS_COUNT)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", SAVED_AT)
def test_four_ranks_go_on_with_the_same_bits(found, case, step):
    """Saved before torch has rebuilt its buckets (1), just after (2) and later (4)."""
    of_ranks = [rank[case][str(step)] for rank in found]
    if case == "static" and step == 1:
        reason = "model: of a static graph it is known from the second step on"
        assert [[reason]] * RANKS_COUNT == [rank["reasons"] for rank in of_ranks]
        return

    assert [[]] * RANKS_COUNT == [rank["reasons"] for rank in of_ranks]
    assert [True] * RANKS_COUNT == [rank["same"] for rank in of_ranks]


def test_without_the_order_the_bits_differ(found):
    """That the order matters is why it is put back; torch never rebuilds the last case."""
    seen = {case: found[0][case]["4"]["without"] for case in CASES}

    assert dict.fromkeys(CASES, False) | {"unused": True} == seen


def test_where_one_rank_cannot_take_the_order_none_does(found):
    """Reducers with different orders would add up gradients of different parameters."""
    said = [rank["one_unfit"]["reasons"] for rank in found]

    assert [True] * RANKS_COUNT == [rank["one_unfit"]["kept"] for rank in found]
    assert [["model: it cannot be done on another rank"]] * (RANKS_COUNT - 1) == said[:-1]
    assert "other parameters learn here" in said[-1][0]
