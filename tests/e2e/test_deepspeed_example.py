"""The example for DeepSpeed is killed and goes on, also with another stage and number of ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.processes import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed_zero.py"


def start(folder, size, stage, steps):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), f"--stage={stage}", f"--steps={steps}",
             f"--folder={folder}"],
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCH_EXTENSIONS_DIR": str(folder.parent / "extensions"),
            },
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def begun(output):
    return [int(line.split()[-1]) for line in output.splitlines() if "begins at step" in line]


@pytest.mark.timeout(600)
def test_the_example_is_killed_and_goes_on_with_another_stage_and_number_of_ranks(tmp_path):
    folder = tmp_path / "run"
    ranks = start(folder, 2, 2, 100_000)
    for line in ranks[0].stdout:
        if line.startswith("step 30:"):
            break  # a save is asked for only when the one before is there: step-20 is
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
        rank.stdout.close()
    latest = int((folder / "latest").read_text().removeprefix("step-"))

    outputs = [rank.communicate(timeout=500)[0] for rank in start(folder, 1, 3, latest + 20)]

    assert latest >= 20
    assert [latest] == begun(outputs[0])
    assert f"step-{latest + 20}" == (folder / "latest").read_text()
