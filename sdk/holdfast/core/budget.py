"""How much arena memory a node needs for a job, written out as a sum (P8)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.protection import Copies, Parity, Protection
from holdfast.errors import InvalidRequestError

SLOTS_PER_RANK = 2
"""One to write while the other holds the newest step. As many hold each copy for others: what is
kept goes only when all of the next step is there (ADR 0044).
"""

DRAINING_SLOTS = 1
"""One more of its own, for the step on its way to the object store: saves never wait for it."""


SLOTS_PER_RANK_MAX = 16


def slots_per_rank(*, persist: bool, asked: int = 0) -> int:
    """Return how many slots a rank has.

    Args:
        persist: Some of its steps go to an object store.
        asked: How many the job asks for, 0: as many as it needs. With two and ``persist`` what
            drains takes what is left of the budget, or the slot of a later step.
    """
    return asked or SLOTS_PER_RANK + (DRAINING_SLOTS if persist else 0)


def saving_slots(slots: int, *, persist: bool) -> int:
    """Return how many of a rank's ``slots`` steps have that do not drain, and copies elsewhere."""
    return slots - DRAINING_SLOTS if persist and slots > SLOTS_PER_RANK else slots


def checked_slots(asked: int) -> int:
    """Return a number of slots that a job may ask for; 0: as many as it needs.

    Raises:
        InvalidRequestError: it is none.
    """
    if asked and not SLOTS_PER_RANK <= asked <= SLOTS_PER_RANK_MAX:
        raise InvalidRequestError(
            f"slots={asked} must be {SLOTS_PER_RANK} to {SLOTS_PER_RANK_MAX}: one holds the newest "
            f"step while another is written"
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a rank asks its agent for: ``slots`` slots of exactly ``length_bytes``, for one plan.

    ``restored_bytes`` is what its rank loads of a checkpoint. ``twins``: it has tensors alike that
    other ranks save, and fills slots for copies of their segments with them.
    """

    plan_hash: str
    length_bytes: int
    slots: int
    restored_bytes: int
    twins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """``slots x own + incoming_slots x incoming + restore``, all in bytes.

    ``own_bytes`` are the segments of this node's ranks at one step; ``incoming_bytes`` the copies,
    or elements of parity, it holds for others, which ``incoming`` names; ``restore_bytes`` what its
    ranks fetch beyond those to restore.
    """

    slots: int
    incoming_slots: int
    own_bytes: int
    incoming_bytes: int
    restore_bytes: int
    incoming: str = "copies"

    @property
    def total_bytes(self) -> int:
        """The sum."""
        kept = self.slots * self.own_bytes + self.incoming_slots * self.incoming_bytes
        return kept + self.restore_bytes

    def __str__(self) -> str:
        parts = [f"{self.slots} slots x {format_bytes(self.own_bytes)} own"]
        if self.incoming_bytes:
            each = format_bytes(self.incoming_bytes)
            parts.append(f"{self.incoming_slots} slots x {each} incoming {self.incoming}")
        if self.restore_bytes:
            parts.append(f"{format_bytes(self.restore_bytes)} to restore")
        return f"{' + '.join(parts)} = {format_bytes(self.total_bytes)}"


def shortfall(need: MemoryNeed, budget_bytes: int, *, beside: str = "", advice: str = "") -> str:
    """Return why a job does not fit, with its sum, in the words of every refusal.

    Args:
        need: Of the job, on one node.
        budget_bytes: The budget of the node's arena.
        beside: What else takes room there, for people; empty: nothing.
        advice: What to do first, ending in a comma and a space; empty: nothing comes first.
    """
    besides = f", beside {beside}" if beside else ""
    return (
        f"{need}{besides}, but the arena's budget is {format_bytes(budget_bytes)}; {advice}raise "
        f"HOLDFAST_BUDGET, lower replicas, or use more nodes"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWish:
    """What a job that is about to begin asks of each of its nodes; see ``memory_need``."""

    own_bytes: int
    restored_bytes: int
    replicas: int
    nodes_count: int
    slots: int
    persist: bool = False
    parity: Parity | None = None
    shards_count: int = 1

    @property
    def protection(self) -> Protection:
        """What the job asks for against the loss of nodes."""
        return self.parity or Copies(self.replicas)


def memory_need(
    *,
    own_bytes: int,
    restored_bytes: int,
    protection: Protection,
    nodes_count: int,
    slots: int = SLOTS_PER_RANK,
    persist: bool = False,
    shards_count: int = 1,
) -> MemoryNeed:
    """Return what one node needs for its ranks to save, to hold copies, and to restore.

    Args:
        own_bytes: Segments of this node's ranks at one step.
        restored_bytes: What it has to have of one step at once so that its ranks can load it: with
            plain DDP all segments, where each rank has a state of its own those that its ranks
            need, beside those that it has for itself and others: see ``restored_bytes_of_part``.
        protection: What was asked for.
        nodes_count: Nodes of the job; copies are cut to one less.
        slots: Slots per segment of its own ranks.
        persist: One of them is for what drains, which is kept at its owner alone.
        shards_count: Segments of this node's ranks at one step; elements are as long as one.
    """
    incoming = protection.incoming_bytes(own_bytes, nodes_count, shards_count)
    return MemoryNeed(
        slots=slots,
        incoming_slots=saving_slots(slots, persist=persist),
        own_bytes=own_bytes,
        incoming_bytes=incoming,
        restore_bytes=protection.left_bytes(max(restored_bytes - own_bytes, 0), incoming),
        incoming=protection.incoming,
    )


def restored_bytes_of_part(
    *, own_bytes: int, loaded_bytes: int, whole_bytes: int, replicas: int
) -> int:
    """Return what a node whose ranks load only a part has to have of a checkpoint at once.

    What ranks that have changed places need lies beside what their node saved, and what it
    holds for others: none of that may go before they have begun.

    Args:
        own_bytes: Segments of this node's ranks at one step.
        loaded_bytes: What its ranks load.
        whole_bytes: The checkpoint.
        replicas: Copies asked for.
    """
    return min(whole_bytes, loaded_bytes + own_bytes * (replicas + 1))
