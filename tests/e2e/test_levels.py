"""Levels that mean what they say, as a script sees them: real stacks, torch ranks."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.stack import READY_S_MAX, environment, running_stack

SCRIPT = """
import holdfast, torch
from holdfast.errors import PreconditionError

model = torch.nn.Linear(4, 4)
ck = holdfast.Checkpointer("alone", {"model": model})
ck.restore()
handle = ck.save(1).wait("local", timeout_s=30)
try:
    handle.wait("replicated")
except PreconditionError as error:
    print("refused:", error)
print("error:", handle.error)
for step in range(2, 8):
    ck.save(step).wait("local", timeout_s=30)
ck.close()
"""


def test_a_job_on_one_node_is_told_that_nothing_is_replicated(tmp_path):
    """F54, P1; defect X9: no wait without an end, saves go on, one warning, one event."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with running_stack(nodes=1) as stack:
        agent = stack.node(0)["agent"]
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment(HOLDFAST_AGENT=agent), capture_output=True, text=True,
            timeout=READY_S_MAX, check=False,
        )  # fmt: skip
        [job] = stack.rest("jobs")
        rows = stack.rest("jobs/alone/checkpoints")
        kinds = [event["kind"] for event in stack.rest("events")]

    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    lack = "replicas=1 needs 2 live nodes, but only 1 is there"
    assert f"refused: step 1 does not become replicated: {lack}" in output
    assert f"error: step 1 stays local: {lack}" in output
    assert output.count("steps stay local") == 1
    assert (job["replicas_allowed"], job["shortage"]) == (0, lack)
    assert {row["level"] for row in rows} == {"local"}
    assert max(row["step"] for row in rows) == 7
    assert kinds.count("replication_cut") == 1
