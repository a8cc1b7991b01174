"""A state whose tensors become others of the same layout while it trains."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.stack import environment, running_stack

SCRIPT = """
import copy
import torch
import holdfast

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = holdfast.Checkpointer("j", {"m": model, "o": optimizer}, replicas=0)
checkpointer.restore()
for step in range(1, 9):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    checkpointer.step(step).wait("local", timeout_s=20)
checkpointer.close()
"""


def test_saves_go_on_after_the_optimizer_was_given_other_tensors(tmp_path):
    """4.2: a new plan of the same layout keeps the slots that the agent goes on leasing."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with running_stack(nodes=1) as stack:
        env = environment(HOLDFAST_HOME=str(stack.home), PATH=os.environ["PATH"])
        done = subprocess.run(
            [sys.executable, str(script)],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        steps = {row["step"] for row in stack.rest("jobs/j/checkpoints")}

    assert set(range(1, 9)) == steps
