"""From the command to the first step of a fresh job beside torchrun, and what a standby takes.

Two ranks on one node train the demo's model; the node's agent runs already, and nothing is warm.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Record, faster
from tests.bench.recover import ROOT, Job
from tests.e2e.stack import Stack, environment, processes, running_stack, until

NAMES = ("start/cold", "standby/memory")
RUNS = 5
RANKS = 2
STANDBY_S_MAX = 60.0
SETTLED_KIB = 1024
"""A standby that takes no more than this from one look to the next has imported all."""
LOOK_S = 1.0
OURS = ("-m", "holdfast.cli.main", "run", "--nproc-per-node", str(RANKS), "-m")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m")


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield a record for a cold start, and one for the memory of a standby."""
    runs = 1 if quick else RUNS
    size = "tiny" if quick else "small"
    with running_stack(1, forked=False) as stack:
        turns = [[_start_s(stack, c, size) for c in (OURS, TORCHRUN)] for _ in range(1 + runs)][1:]
        ours, peer = (list(seconds) for seconds in zip(*turns, strict=True))
        yield faster(
            "start/cold",
            ours,
            peer,
            peer="torchrun, the same script with Holdfast",
            length_bytes=0,
            note=f"{RANKS} ranks on one node, the demo's model; from the command to the first step "
            f"of all, in turn",
            times_min=1.0,
        )
        yield _memory([_standby_kib(stack) for _ in range(runs)])


def _start_s(stack: Stack, command: tuple[str, ...], size: str) -> float:
    """Launch a job of its own; return the seconds until all ranks have done a step."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    paths = (str(ROOT), str(ROOT / "sdk"), str(ROOT / "services"))
    env = environment(GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(paths))
    job = Job(folder, size=size, env=env)
    try:
        began_s = time.time()
        job.start([sys.executable, *command], stack.node(0)["agent"])
        return max(float(step["at"]) for step in job.until_steps(1, 0.0)) - began_s
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)


def _standby_kib(stack: Stack) -> tuple[int, int]:
    """Return RSS and PSS of one of two standbys of a launcher that waits for another node."""
    folder = tempfile.mkdtemp(prefix="bench-")
    script = Path(folder) / "train.py"
    script.touch()
    env = environment(HOLDFAST_AGENT=stack.node(0)["agent"], BENCH=folder)
    command = [sys.executable, *OURS[:-1], "--nnodes", "2", str(script)]
    launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    try:
        until(lambda: len(_standbys(folder)) == RANKS, "standbys", STANDBY_S_MAX)
        pid = _standbys(folder)[0]
        before = (0, 0)
        ends_s = time.monotonic() + STANDBY_S_MAX
        while (now := _memory_kib(pid))[0] > before[0] + SETTLED_KIB:
            assert time.monotonic() < ends_s, "a standby that takes ever more memory"
            before = now
            time.sleep(LOOK_S)
        return now
    finally:
        launcher.terminate()
        launcher.wait(STANDBY_S_MAX)
        shutil.rmtree(folder, ignore_errors=True)


def _standbys(folder: str) -> list[int]:
    return processes("rank_process", f"BENCH={folder}")


def _memory_kib(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return int(found["Rss"]), int(found["Pss"])


def _memory(found: list[tuple[int, int]]) -> Record:
    rss, pss = (statistics.median(each) / 1024 for each in zip(*found, strict=True))
    return Record(
        name="standby/memory",
        value=rss,
        unit="MiB",
        peer="",
        peer_value=None,
        ratio=1.0,
        bytes=0,
        note=f"resident, with torch's build for CPUs; {pss:.0f} MiB is its part if two of them "
        f"share what they can; n={len(found)}",
        target="",
        met=True,
    )
