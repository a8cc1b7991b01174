"""What the nodes of the next round begin to fetch before its ranks are there (ADR 0077).

Once the last step of a round is committed, and another round has begun, it is known what will be
restored and where, seconds before a rank can ask for it. It follows from the launch and the run
alone: with the registration of the next attempt the run is not of the round before any more.

A wrong guess costs bytes and nothing else: ranks say what they need all the same, and where they
do, nothing is fetched early on a node that has no room for all of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.attempts import named_nonce
from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import Want, WantReason
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    whole,
)
from holdfast_services.metadata.domain.copies_to_fetch import Wants, want_of
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.model import Node, Run

EARLY_COPIES_S_MAX = 120.0
"""So long after a round has begun nodes begin to fetch for it; its ranks come sooner, or never."""
LAST_STEP_S_MAX = 600.0
"""After it was announced: of a job that has ended since nobody looks for a next round for ever."""


@dataclass(frozen=True, slots=True)
class _Seats:
    """The ranks from ``first`` to before ``end``, of ``world_size``, that ``node`` will have."""

    node: str
    first: int
    end: int
    world_size: int

    def overlap(self, rank: int, saved: int) -> bool:
        """Tell whether a rank of ``saved`` had some of what these have, in equal parts of all."""
        begins_before = rank * self.world_size < self.end * saved
        return begins_before and self.first * saved < (rank + 1) * self.world_size


def has_last_step(run: Run, now_s: float) -> bool:
    """Tell whether the round that trains ``run``, or did lately, ends after a step."""
    recent = now_s < run.announced_at_s + LAST_STEP_S_MAX
    return recent and run.announcement is not None and run.announcement.reason.ends_round


def early_copies(
    runs: Sequence[Run],
    launches: Sequence[Launch],
    evidence: Mapping[str, Evidence],
    live: Mapping[str, Node],
    repairs: Mapping[str, Wants],
    now_s: float,
) -> Mapping[str, Wants]:
    """Return run -> node -> copies that ranks of the next round will need there, as is guessed.

    No more than a node has room for beside its ``repairs``, so that no copy and no lease is given
    up for them. What is in its repairs already is not named again.
    """
    found: dict[str, Wants] = {}
    left_bytes: dict[str, int] = {}
    for run in runs:
        key = last_step(run, now_s)
        launch = _next_round(run, launches, now_s) if key else None
        copies = evidence[run.id].sources.get(key, {}) if key else {}
        if launch is None or not whole(copies):
            continue
        left_bytes = left_bytes or room_left(live, repairs)
        beside = repairs.get(run.id, {})
        found[run.id] = {
            seats.node: _early(run, copies, seats, turn, beside.get(seats.node, ()), left_bytes)
            for turn, seats in enumerate(_seats(launch))
            if seats.node in live
        }
    return found


def last_step(run: Run, now_s: float) -> CheckpointId | None:
    """Return the newest step of the attempt, if that is the announced one, or came after it.

    None: no last step is announced, or it is not committed yet.
    """
    announced = run.announcement
    if announced is None or not has_last_step(run, now_s):
        return None
    rows = (row.id for row in run.checkpoints if row.id.generation == run.generation)
    newest = max((key for key in rows if run.usable(key)), default=None)
    return newest if newest and newest.step >= announced.step else None


def _next_round(run: Run, launches: Sequence[Launch], now_s: float) -> Launch | None:
    """Return the launch whose round is on, and whose round before was the run's attempt."""
    nonce = run.current.spec.nonce if run.current else b""
    for launch in launches:
        recent = now_s < launch.began_at_s + EARLY_COPIES_S_MAX
        if launch.on and recent and named_nonce(launch.nonce_before) == nonce:
            return launch
    return None


def room_left(live: Mapping[str, Node], repairs: Mapping[str, Wants]) -> dict[str, int]:
    """Return what nodes have room for beside the copies that are made up there, in bytes."""
    left = {name: node.inventory.room_bytes for name, node in live.items()}
    for wants in repairs.values():
        for node, items in wants.items():
            left[node] = left.get(node, 0) - sum(want.shard.length_bytes for want in items)
    return left


def _seats(launch: Launch) -> Iterator[_Seats]:
    world_size = sum(member.ranks for member in launch.members)
    first = 0
    for member in launch.members:
        yield _Seats(member.node, first, first + member.ranks, world_size)
        first += member.ranks


def _early(
    run: Run,
    copies: CheckpointCopies,
    seats: _Seats,
    turn: int,
    repaired: Sequence[Want],
    left_bytes: dict[str, int],
) -> tuple[Want, ...]:
    """Return what a node should fetch, and take it from what it has left."""
    named = {want.shard.id for want in repaired}
    lacked = [
        item
        for key, item in sorted(copies.items())
        if seats.node not in item.nodes and key not in named
    ]
    if _is_guess(run) and sum(i.shard.length_bytes for i in lacked) > left_bytes[seats.node]:
        return ()  # what was guessed wrongly would stand where a restore puts what it needs
    wanted: list[Want] = []
    for item in lacked:
        if _is_guess(run) and not seats.overlap(item.shard.id.rank, item.shard.world_size):
            continue
        if item.shard.length_bytes > left_bytes[seats.node]:
            continue
        left_bytes[seats.node] -= item.shard.length_bytes
        wanted.append(want_of(item, WantReason.REPAIR, turn))
    return tuple(wanted)


def _is_guess(run: Run) -> bool:
    """Tell whether what ranks will need is not known: they name it, else they need all."""
    return run.attempt is not None and run.attempt.spec.names_needs
