"""How long a restarted process takes to get its state back from memory, beside torch.load.

Each load runs in a fresh process, as a restart does, with model and optimizer built and nothing
loaded: ``python -m tests.bench.restore ours|peer LENGTH_BYTES FILE`` prints seconds by phase.
The fixed cost is what a restore takes beside loading, measured with a small state.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.bench.harness import Record, faster, in_turn
from tests.bench.subject import Saving, Subject, agent

import holdfast

NAMES = ("restore/torch_load", "restore/fixed_cost")
FIXED_MS_MAX = 60.0
SMALL_BYTES = 16 << 20
RUNS = 5
JOB = "restore"
TENSORS_COUNT = 201
PROCESS_S_MAX = 120.0


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the records; the peer reads from the page cache."""
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build"))
    try:
        with agent():
            yield _measure(folder / "state.pt", (1 << 30) // (16 if quick else 1))
        with agent():
            yield _fixed_cost(folder)
    finally:
        shutil.rmtree(folder)


def _saved(length_bytes: int) -> Subject:
    """Return a state of which a checkpoint lies in memory."""
    subject = Subject(tensors_count=TENSORS_COUNT, length_bytes=length_bytes)
    saving = Saving(subject, job=JOB)
    saving.train_and_save(1)
    saving.settle()
    saving.ck.close()
    return subject


def _fixed_cost(folder: Path) -> Record:
    """Return what importing, making and deciding take, whatever the size."""
    subject = _saved(SMALL_BYTES)
    runs = [_in_fresh_process("ours", SMALL_BYTES, folder) for _ in range(1 + 2 * RUNS)][1:]
    value_ms = statistics.median(sum(run.values()) - run["load"] for run in runs) * 1e3
    return Record(
        name="restore/fixed_cost",
        value=value_ms,
        unit="ms",
        peer="",
        peer_value=None,
        ratio=value_ms / FIXED_MS_MAX,
        bytes=subject.length_bytes,
        note=f"fresh processes, all but the copying; ms: {_medians(runs)}; n={len(runs)}",
        target=f"<= {FIXED_MS_MAX:g} ms",
        met=value_ms <= FIXED_MS_MAX,
    )


def _measure(path: Path, length_bytes: int) -> Record:
    subject = _saved(length_bytes)
    torch.save(subject.state_dict(), path)
    phases: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}

    def load(who: str) -> float:
        seconds = _in_fresh_process(who, length_bytes, path)
        phases[who].append(seconds)
        return sum(seconds.values())

    ours_s, peer_s = in_turn(lambda: load("ours"), lambda: load("peer"), runs=RUNS, warm_up=1)
    return faster(
        "restore/torch_load",
        ours_s,
        peer_s,
        peer="torch.load, load_state_dict; file in the page cache",
        length_bytes=subject.length_bytes,
        note=f"fresh processes; ms: {_medians(phases['ours'])}, every byte verified; "
        f"peer {_medians(phases['peer'])}",
        times_min=3,
    )


def _medians(runs: list[dict[str, float]]) -> str:
    return ", ".join(
        f"{phase} {statistics.median(seconds[phase] for seconds in runs) * 1e3:.0f}"
        for phase in runs[0]
    )


def _in_fresh_process(who: str, length_bytes: int, path: Path) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.restore", who]
    done = subprocess.run(
        [*command, str(length_bytes), str(path)],
        stdout=subprocess.PIPE,
        timeout=PROCESS_S_MAX,
        check=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _ours(subject: Subject) -> dict[str, float]:
    """Return the seconds by phase of making a Checkpointer and of its restore."""
    started_s = time.perf_counter()
    make = holdfast.Checkpointer  # imported now
    imported_s = time.perf_counter()
    ck = make(JOB, subject.state, save=holdfast.Never(), replicas=0, rng=False)
    made_s = time.perf_counter()
    restored = ck.restore()
    ended_s = time.perf_counter()
    assert restored is not None, "nothing was restored"
    ck.close()
    phases = {"import": imported_s - started_s, "make": made_s - imported_s, **restored.seconds}
    return {**phases, "rest": ended_s - started_s - sum(phases.values())}


def _peer(subject: Subject, path: Path) -> dict[str, float]:
    started_s = time.perf_counter()
    state = torch.load(path)
    read_s = time.perf_counter()
    subject.load_state_dict(state)
    return {"torch.load": read_s - started_s, "load_state_dict": time.perf_counter() - read_s}


if __name__ == "__main__":
    built = Subject(tensors_count=TENSORS_COUNT, length_bytes=int(sys.argv[2]), trained=False)
    print(json.dumps(_ours(built) if sys.argv[1] == "ours" else _peer(built, Path(sys.argv[3]))))
