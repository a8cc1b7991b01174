"""Whether a thousand saves leave anything behind: resident memory of both sides, and the arena."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Record
from tests.bench.subject import Saving, Subject, agent
from tests.e2e.stack import Stack

NAMES = ("memory/1000_saves",)
SAVES = 1000
SETTLED = 100  # caches and pools are filled by then
LIMIT_BYTES = 8 << 20


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record: the growth from the 100th to the 1,000th save (F29)."""
    with agent() as stack:
        saving = Saving(Subject(tensors_count=201, length_bytes=4 << 20), job="memory")
        _save(saving, SETTLED)
        before = _held(stack)
        _save(saving, (2 * SETTLED if quick else SAVES) - SETTLED)
        after = _held(stack)
        saving.ck.close()
    growth = {name: after[name] - before[name] for name in before}
    worst_bytes = max(growth.values())
    in_words = ", ".join(f"{name} {grown / 1024:+.0f} KiB" for name, grown in growth.items())
    yield Record(
        name="memory/1000_saves",
        value=worst_bytes / (1 << 20),
        unit="MiB grown",
        peer="limit",
        peer_value=LIMIT_BYTES / (1 << 20),
        ratio=worst_bytes / LIMIT_BYTES,
        bytes=4 << 20,
        note=f"{in_words}; saves {SETTLED} to {saving.subject.steps_done}",
        target="flat: below the limit",
        met=worst_bytes <= LIMIT_BYTES,
    )


def _save(saving: Saving, count: int) -> None:
    for _ in range(count):
        saving.train_and_save(1)
        saving.settle()


def _held(stack: Stack) -> dict[str, int]:
    """Return what trainer and agent have resident, without shared pages, and the arena's size."""
    agent_pid = stack.agent_pid(0)
    assert agent_pid is not None, "the agent is down"
    arena = sum(file.stat().st_blocks * 512 for file in stack.arena(0).rglob("*"))
    return {"trainer": _resident("self"), "agent": _resident(agent_pid), "arena": arena}


def _resident(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
