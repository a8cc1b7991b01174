"""The demo itself, with a model small enough for a test: both faults, the same modules."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.e2e.stack import ROOT, environment

DEMO = ROOT / "examples" / "demo" / "run.py"
STEPS = 60
DEMO_S_MAX = 240


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S_MAX + 30)
def test_a_run_that_lost_a_rank_and_a_node_equals_one_that_lost_nothing(tmp_path):
    """P5, G3, G8, G9: loss curve, parameters and optimizer state are equal bit by bit, and a lost
    node's memory comes from its peer. Steps of 30 ms are shorter than a commit on a busy machine:
    some pass unsaved, how many is luck; no recovery begins at step 0 again.
    """
    result = tmp_path / "demo.json"
    done = subprocess.run(
        [
            *(sys.executable, str(DEMO), "--size", "tiny", "--steps", str(STEPS)),
            *("--launcher", "holdfast run"),
            *("--dir", str(tmp_path / "demo"), "--result", str(result)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEMO_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())

    assert found["bit_identical"] is True
    assert found["steps"] == STEPS
    [faults] = found["faults"].values()
    rank_killed, _, node_lost = faults
    assert [(fault["kind"], fault["warm"]) for fault in faults] == [
        ("rank_killed", False),
        ("rank_killed", True),
        ("node_lost", False),
    ]
    for number, fault in enumerate(faults, 1):
        assert 0 <= fault["lost_steps"] < number * STEPS // 4, faults
        assert sum(fault["sources"].values()) > 0, faults
    assert rank_killed["sources"]["memory"] > 0
    assert node_lost["sources"]["peer"] > 0
    for fault in faults:
        assert min(fault["phases"].values()) >= 0
        assert sum(fault["phases"].values()) == pytest.approx(fault["recovery_s"])
    assert "bit-identical" in done.stdout
