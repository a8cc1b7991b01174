"""A rank is killed while DeepSpeed saves: what ``latest`` names loads bit for bit, on any ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.nursery import QUICK

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEATHS_COUNT, SIZES = 11, (2, 3)

pytestmark = pytest.mark.timeout(900)


def test_what_latest_names_loads_bit_for_bit_after_a_rank_was_killed(tmp_path):
    """With the ranks that saved and with more; what was saved before counts until the new is."""
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
           "PYTHONPATH": f"{QUICK}:{ROOT}:{ROOT / 'sdk'}"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "kills.py"), str(tmp_path)],
        env=env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"death"')]

    assert DEATHS_COUNT * len(SIZES) == len(lines)
    assert {-signal.SIGKILL} == {line["code"] for line in lines}
    found = {(line["death"], line["latest"], *line["same"]) for line in lines}
    # Whether rank 0 still gets to commit depends on when it sees that rank 1 is gone.
    racing = {("rank 1 once it has told", "a", "before"), ("rank 1 once it has told", "b", "after")}
    assert found - racing == {
        ("rank 0 before its payload", "a", "before"),
        ("rank 0 after its payload", "a", "before"),
        ("rank 0 before the manifest", "a", "before"),
        ("rank 0 after the manifest", "a", "before"),
        ("rank 0 after latest", "b", "after"),
        ("rank 0 with the tag again, after the manifest", "a", "before"),
        ("rank 0 with the tag again, in its place", "a", "after"),
        ("rank 0 with the tag again, between two renames", "a", "after"),
        ("rank 1 before its payload", "a", "before"),
        ("rank 1 with the tag again, after its payload", "a", "before"),
    }
