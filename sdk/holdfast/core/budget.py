"""How much arena memory a node needs for a job, written out as a sum (P8)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.protection import Copies

SLOTS_PER_RANK = 2
"""One to write while the other holds the newest step."""

PERSIST_SLOTS_PER_RANK = 3
"""One more, for the step that is on its way to the object store: saves never wait for it."""


def slots_per_rank(*, persist: bool) -> int:
    """Return how many slots a rank needs; ``persist``: some of its steps go to an object store."""
    return PERSIST_SLOTS_PER_RANK if persist else SLOTS_PER_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a rank asks its agent for: ``slots`` slots of exactly ``length_bytes``, for one plan.

    ``restored_bytes`` is what its rank loads of a checkpoint.
    """

    plan_hash: str
    length_bytes: int
    slots: int
    restored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """``slots x (own + incoming) + restore``, all in bytes.

    ``own_bytes`` are the segments of this node's ranks at one step; ``incoming_bytes`` the copies
    it holds for others; ``restore_bytes`` what its ranks fetch beyond those to restore.
    """

    slots: int
    own_bytes: int
    incoming_bytes: int
    restore_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.slots * (self.own_bytes + self.incoming_bytes) + self.restore_bytes

    def __str__(self) -> str:
        return (
            f"{self.slots} slots x ({format_bytes(self.own_bytes)} own + "
            f"{format_bytes(self.incoming_bytes)} incoming copies) + "
            f"{format_bytes(self.restore_bytes)} to restore = {format_bytes(self.total_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWish:
    """What a job that is about to begin asks of each of its nodes; see ``memory_need``."""

    own_bytes: int
    restored_bytes: int
    replicas: int
    nodes_count: int
    slots: int


def memory_need(
    *,
    own_bytes: int,
    restored_bytes: int,
    protection: Copies,
    nodes_count: int,
    slots: int = SLOTS_PER_RANK,
) -> MemoryNeed:
    """Return what one node needs for its ranks to save, to hold copies, and to restore.

    Args:
        own_bytes: Segments of this node's ranks at one step.
        restored_bytes: What it has to have of one step at once so that its ranks can load it: with
            plain DDP all segments, where each rank has a state of its own those that its ranks
            need, beside those that it has for itself and others.
        protection: What was asked for.
        nodes_count: Nodes of the job; copies are cut to one less.
        slots: Slots per segment.
    """
    incoming = protection.incoming_bytes(own_bytes, nodes_count)
    return MemoryNeed(
        slots=slots,
        own_bytes=own_bytes,
        incoming_bytes=incoming,
        restore_bytes=max(restored_bytes - own_bytes - incoming, 0),
    )
