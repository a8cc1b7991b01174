"""The trainer dies at every operation of one save: the next attempt has all of it, or none."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from tests.crash.arenas import leftovers, torn, used_bytes
from tests.e2e.stack import ROOT, environment, running_stack, until

pytestmark = pytest.mark.timeout(300)
SWEEP_S_MAX = 240
EXPECTED = {"write", "copy", "rename", "unlock", "lock", "call"}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Sweep once on a stack of one node; return what the lives said and what the arena has."""
    with running_stack(nodes=1) as stack:
        env = environment(
            PYTHONPATH=f"{ROOT / 'sdk'}:{ROOT / 'services'}:{ROOT}",
            HOLDFAST_AGENT=stack.node(0)["agent"],
            HOLDFAST_LAUNCH="test",
            GRPC_ENABLE_FORK_SUPPORT="0",
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.crash.rank"],
            env=env, cwd=tmp_path_factory.mktemp("rank"), capture_output=True, text=True,
            check=False, timeout=SWEEP_S_MAX,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:] + stack.log()
        arena = stack.arena(0)
        until(lambda: not list(arena.glob("*.closed")), "closed slots are dealt with")
        found = json.loads(done.stdout)
        found |= {"torn": torn(arena), "leftovers": leftovers(arena), "used": used_bytes(arena)}
        found["lengths"] = sorted(path.stat().st_size for path in arena.glob("*.seg"))
        return found


def test_every_operation_of_a_save_was_a_place_of_death(swept):
    """The sweep is whole: what a save does is wrapped, and each operation killed twice."""
    assert EXPECTED <= {point.split()[1] for point in swept["points"]}
    ends = [life[-1] for life in swept["lives"]]

    assert set(swept["points"]) == {end["point"] for end in ends if end.get("killed")}


def test_the_next_attempt_restores_the_step_or_the_one_before_bit_by_bit(swept):
    """P1, P5, G8: never an error, never a mixture, nothing older than the last `local`."""
    assert [] == [said["failed"] for life in swept["lives"] for said in life if "failed" in said]
    outcomes = set()
    for life, following in itertools.pairwise(swept["lives"]):
        prints = {said["step"]: said["fingerprint"] for said in life if "step" in said}
        (last,) = (said["armed"] for said in life if "armed" in said)
        got = next(said for said in following if "restored" in said)
        assert got["restored"] in (last, last - 1), (life[-1], got["restored"], last)
        assert got["fingerprint"] == prints[got["restored"]], (life[-1], got["restored"])
        outcomes.add(last - got["restored"])

    assert {0, 1} == outcomes, "deaths before and after the close were both seen"


def test_no_torn_segment_is_left_and_no_slot_is_lost(swept):
    """P3, P5, F30: every sealed slot has the bytes of its sidecar; the dead keep no memory."""
    assert [] == swept["torn"]
    assert [] == swept["leftovers"]
    assert swept["lengths"], "the last save is there"
    assert swept["used"] <= 4 * max(swept["lengths"])
