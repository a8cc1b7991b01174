"""A rank of a save of DeepSpeed's plug dies at every operation: ``latest`` names what is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.e2e.stack import ROOT

pytestmark = pytest.mark.timeout(600)
POINTS_MIN = {("new", 0): 12, ("again", 0): 12, ("renames", 0): 5, ("new", 1): 4, ("again", 1): 4}
BEFORE, AFTER = [1.0, 2.0], [2.0, 3.0]


@pytest.mark.parametrize(("kind", "rank"), POINTS_MIN)
def test_latest_names_what_is_whole_wherever_a_rank_dies(tmp_path, kind, rank):
    """A new tag, one that is saved again, and that where folders cannot be exchanged in one step.

    The next save is a checkpoint, and nothing is left of the one that died.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.deepspeed_ranks", str(tmp_path), kind, str(rank)],
        env={"PATH": os.environ["PATH"],
             "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}:{ROOT / 'services'}"},
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    deaths = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(deaths) >= POINTS_MIN[kind, rank]
    assert {-signal.SIGKILL} == {death["code"] for death in deaths}
    whole = {"a": [BEFORE] if kind == "new" else [BEFORE, AFTER], "b": [AFTER]}
    assert [] == [d for d in deaths if d["values"] not in whole[d["latest"]]]
    assert [] == [d for d in deaths if d["left"] or d["next"] != [9.0]]
    assert [BEFORE, AFTER] == sorted(map(list, {tuple(d["values"]) for d in deaths}))
