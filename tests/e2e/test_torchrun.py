"""Under torchrun's elastic agents: restarts make one attempt, whoever restarts whom.

Interleaving 12. ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: with the shared store a restarted gloo
rank may read its peer's old address and hang.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from tests.e2e.stack import TRAINER, environment, free_port, processes, running_stack, until


@pytest.fixture
def stack():
    with running_stack(nodes=2) as running:
        yield running


def test_two_agents_restart_their_workers_into_one_generation_both_times(stack, tmp_path):
    """Two SIGKILLs, two restarts of both workers: generations 1, 2, 3 and the same end."""
    port = free_port()
    job = f"rdzv{port}"
    agents = []
    for node in (0, 1):
        env = environment(
            HOLDFAST_AGENT=stack.node(node)["agent"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
            f"--rdzv-id={job}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
            "--max-restarts=5", "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3",
            str(TRAINER), "--job", f"rdzv{port}", "--steps", "60", "--pause-s", "0.1",
        ]  # fmt: skip
        with (tmp_path / f"{node}.log").open("w") as out:
            agents.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    log = tmp_path / "0.log"

    def restores() -> list[str]:
        return re.findall(r"^restored (\d+)", log.read_text(), re.MULTILINE)

    def last_step() -> int:
        return max(map(int, re.findall(r"^step (\d+) ", log.read_text(), re.MULTILINE)), default=0)

    try:
        for round_number in (1, 2):
            until(lambda r=round_number: len(restores()) == r, f"start {round_number}")
            until(lambda r=round_number: last_step() >= 10 * r, f"step {10 * round_number}")
            os.kill(processes(str(TRAINER), "TORCHELASTIC_RUN_ID=" + job)[-1], signal.SIGKILL)
        assert [agent.wait(120) for agent in agents] == [0, 0], log.read_text()[-3000:]
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(30)

    ends = [
        set(re.findall(r"^final (\w+)", (tmp_path / f"{n}.log").read_text(), re.MULTILINE))
        for n in (0, 1)
    ]
    assert len(restores()) == 3
    assert len(ends[0]) == 1
    detail = stack.rest(f"jobs/{job}")
    assert detail["generation"] == 3, detail
