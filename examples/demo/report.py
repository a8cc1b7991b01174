"""What the journals of two runs prove: the curves, the final state, the cost of each fault.

Pure reading: nothing here starts, stops or waits for anything. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PHASES = ("detect", "start", "decide", "fetch", "load", "first_step")


class Journals:
    """The lines that all ranks of one run have written so far, by rank."""

    def __init__(self, folder: Path, *, ranks: int) -> None:
        self._paths = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
        self.by_rank: list[list[Event]] = [[] for _ in self._paths]

    def refresh(self) -> Journals:
        """Read again from disk; a line still being written is left for the next time."""
        self.by_rank = [list(_whole_lines(path)) for path in self._paths]
        return self

    def of(self, rank: int, event: str, *, after: float = 0.0) -> list[Event]:
        """Return the events of one kind that ``rank`` wrote later than ``after``."""
        return [e for e in self.by_rank[rank] if e["event"] == event and e["at"] > after]

    def has_completed(self, step: int) -> bool:
        """Tell whether every rank has completed ``step``."""
        return self.completed() >= step

    def completed(self, *, before: float = float("inf")) -> int:
        """Return the last step that every rank had completed."""
        return min(
            max((e["step"] for e in self.of(rank, "step") if e["at"] <= before), default=0)
            for rank in range(len(self.by_rank))
        )

    def recovered(self, killed_at: float) -> bool:
        """Tell whether every rank has completed a step since ``killed_at``."""
        return all(self.new_step(rank, killed_at) for rank in range(len(self.by_rank)))

    def new_step(self, rank: int, killed_at: float) -> Event | None:
        """Return the first step that ``rank`` completed after a restore later than the kill."""
        restored = self.of(rank, "restored", after=killed_at)
        steps = self.of(rank, "step", after=restored[0]["at"]) if restored else []
        return steps[0] if steps else None

    def pids_on(self, agent: str) -> list[int]:
        """Return the process ids of the ranks on the node of this agent, as they began last."""
        begun = [self.of(rank, "start")[-1] for rank in range(len(self.by_rank))]
        return [event["pid"] for event in begun if event["agent"] == agent]

    def stall_ms_median(self) -> float:
        """Return the median over all steps and ranks of what a save kept training waiting."""
        steps = [e for rank in range(len(self.by_rank)) for e in self.of(rank, "step")]
        stalls_s: list[float] = [e["stall_s"] for e in steps if e["stall_s"] is not None]
        return statistics.median(stalls_s) * 1e3


def _whole_lines(path: Path) -> Iterator[Event]:
    if path.exists():
        text = path.read_text(encoding="utf-8")
        yield from map(json.loads, text[: text.rfind("\n") + 1].splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault cost. ``phases`` are seconds and add up to ``recovery_s``; sources bytes.

    ``warm``: a fault of this kind was recovered from before, so all that a restart reads lies in
    the page cache, compiled. The first one, cold, finds what the start of the job has left there.
    """

    kind: str
    warm: bool
    lost_steps: int
    recovery_s: float
    phases: dict[str, float]
    sources: dict[str, int]


def recoveries(kills: Sequence[tuple[str, float]], journals: Journals) -> list[Recovery]:
    """Return what each fault cost, from the kinds and the times of the kills, in order."""
    found: list[Recovery] = []
    for kind, killed_at in kills:
        warm = any(each.kind == kind for each in found)
        found.append(recovery(kind, killed_at, journals, warm=warm))
    return found


def recovery(kind: str, killed_at: float, journals: Journals, *, warm: bool) -> Recovery:
    """Return what the fault at ``killed_at`` cost, until each rank had done a new step.

    The phases are those of the slowest rank, of the attempt that succeeded: ``detect`` lasts
    until its process has started, not at all if that is a standby, which was there before;
    ``start`` until it asks for the state back; ``decide`` is what the restore took beside
    fetching and loading.
    """
    attempts = [_attempt(journals, rank, killed_at) for rank in range(len(journals.by_rank))]
    start, asked, restored, first_step = max(attempts, key=lambda attempt: attempt[3]["at"])
    restore_s = restored["at"] - asked["at"]
    fetch_s, load_s = restored["seconds"]["fetch"], restored["seconds"]["load"]
    begun = max(start["at"], killed_at)
    seconds = (
        begun - killed_at,
        asked["at"] - begun,
        restore_s - fetch_s - load_s,
        fetch_s,
        load_s,
        first_step["at"] - restored["at"],
    )
    sources: dict[str, int] = {}
    for _, _, of_rank, _ in attempts:
        for tier, length_bytes in of_rank["sources"].items():
            sources[tier] = sources.get(tier, 0) + length_bytes
    return Recovery(
        kind=kind,
        warm=warm,
        lost_steps=max(journals.completed(before=killed_at) - restored["step"], 0),
        recovery_s=first_step["at"] - killed_at,
        phases=dict(zip(PHASES, seconds, strict=True)),
        sources=sources,
    )


def _attempt(journals: Journals, rank: int, killed_at: float) -> tuple[Event, ...]:
    """Return what led to the first step after the kill: start, restoring, restored, step.

    In the order in which they were written: the process of a later attempt may have started before
    that step, as a standby, and says so when it has become the rank.
    """
    first_step = journals.new_step(rank, killed_at)
    assert first_step is not None, f"rank {rank} has not recovered"
    written = journals.by_rank[rank]
    last = {e["event"]: e for e in written[: written.index(first_step)]}
    return (*(last[kind] for kind in ("start", "restoring", "restored")), first_step)


def differences(reference: Journals, journals: Journals, *, steps: int) -> list[str]:
    """Return how the runs differ, in words; empty when they are equal bit by bit.

    Compared on every rank: the loss of every step, each time it was computed, and every tensor of
    the final parameters and optimizer state.
    """
    found = []
    for rank in range(len(reference.by_rank)):
        losses = {e["step"]: e["loss"] for e in reference.of(rank, "step")}
        seen = journals.of(rank, "step")
        missing = set(range(1, steps + 1)) - ({e["step"] for e in seen} & losses.keys())
        found += [f"rank {rank}: no loss of step {step}" for step in sorted(missing)]
        found += [
            f"rank {rank} step {e['step']}: loss {e['loss']}, not {losses.get(e['step'])}"
            for e in seen
            if e["loss"] != losses.get(e["step"])
        ]
        wanted, got = _final(reference, rank), _final(journals, rank)
        found += [
            f"rank {rank}: tensor {name} differs"
            for name in sorted(wanted.keys() | got.keys())
            if wanted.get(name) != got.get(name)
        ]
        if not wanted:
            found.append(f"rank {rank}: the reference has no final state")
    return found


def _final(journals: Journals, rank: int) -> dict[str, str]:
    done = journals.of(rank, "done")
    return dict(done[-1]["fingerprints"]) if done else {}
