"""What metadata answers an agent: a level, each replaces the one before.

Each class has the name and the fields of a message in ``proto/holdfast/v1``; ``rpc.codec`` turns
one into the other by those names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement
from holdfast.core.decision import Decision
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.protection import NO_COPIES, Copies
from holdfast.core.shard import Shard
from holdfast.core.sources import Source
from holdfast.core.stripes import Element, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class SupersedeRule:
    """Left by a restore or a rollback: a checkpoint later than it and older in generation is void.

    Of generations before ``from_generation`` it says nothing: see ``lines``.
    """

    after_step: int
    below_generation: int
    from_generation: int = 0

    def covers(self, key: CheckpointId | ShardId) -> bool:
        """Tell whether the checkpoint, or that of the shard, may no longer be chosen."""
        in_time = self.from_generation <= key.generation < self.below_generation
        return in_time and key.step > self.after_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint whose level is a fact; ``local`` is implied.

    ``draining``: it is on its way to the object store.
    """

    checkpoint: CheckpointId
    replicated: bool = False
    durable: bool = False
    draining: bool = False


class WantReason(IntEnum):
    """Why a node should fetch a copy; restores come first.

    HEAD: it should not, but its ranks may ask for the head, which nobody has.
    """

    UNSPECIFIED = 0
    RESTORE = 1
    REPAIR = 2
    HEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A copy that this node should fetch, and its sources in the order to ask them.

    The object store is the last. ``owner`` is the node whose trainer wrote it; empty: nobody knows,
    since the object store alone has it.
    """

    shard: Shard
    sources: tuple[Source, ...]
    reason: WantReason
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementWant:
    """An element that this node should make, and who has the members of its stripe."""

    element: Element
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a node needs to know of one run; see ``NodeView``.

    ``ring`` lists the nodes of the attempt in placement order. ``free_before`` is the newest
    checkpoint of which all copies that could be made lie with holders that have said that they know
    of the commit: slots of older ones may be freed. ``copies`` are those that the live nodes allow;
    ``shortage`` why that is fewer than asked for, if no node that was lost may still come back.
    ``attempt`` is the generation of the newest attempt that the catalogue knows, 0: of none;
    ``nonce`` names it: after a lost catalogue another attempt may have had the same generation.
    ``seats`` are those of its ranks that are registered from this node: each must be known again.
    ``drained`` are the shards that this node keeps on their way to the object store: of each shard
    one holder does. ``saving_slots`` are those that a rank has for steps that do not drain.
    """

    run: str
    job: str
    generation: int
    world_size: int
    ring: tuple[str, ...] = ()
    copies: Copies = NO_COPIES
    committed: tuple[Committed, ...] = ()
    free_before: CheckpointId | None = None
    pinned: tuple[CheckpointId, ...] = ()
    drained: tuple[ShardId, ...] = ()
    saving_slots: int = 0
    superseded: tuple[SupersedeRule, ...] = ()
    abandoned: tuple[AbandonedStep, ...] = ()
    announcement: Announcement | None = None
    decision: Decision | None = None
    shortage: str = ""
    attempt: int = 0
    nonce: bytes = b""
    seats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Everything a node acts on, as of one transaction of the catalogue.

    ``taken_incarnation``, ``taken_sequence``: the node's last inventory that was known then; 0:
    none was. The version does not speak of them. ``spares`` are copies on this node of which as
    many as the policy asks for lie elsewhere: a restore that has no room may take theirs.
    ``elements`` are to be made here; ``spare_elements`` names those here that nothing needs.
    ``awaited_by`` are the nonces of attempts whose restore waits for this node's next report.
    """

    version: str
    nodes: tuple[Peer, ...] = ()
    runs: tuple[RunView, ...] = ()
    wants: tuple[Want, ...] = ()
    incarnation_min: int = 0
    taken_incarnation: int = 0
    taken_sequence: int = 0
    spares: tuple[ShardId, ...] = ()
    elements: tuple[ElementWant, ...] = ()
    spare_elements: tuple[str, ...] = ()
    awaited_by: tuple[bytes, ...] = ()

    @property
    def taken(self) -> tuple[int, int]:
        """The order of the views of one node: by the inventory that each answers (M4)."""
        return self.taken_incarnation, self.taken_sequence
