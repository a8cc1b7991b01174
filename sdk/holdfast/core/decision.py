"""Where an attempt begins, and what it restores for that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from holdfast.core.ids import CheckpointId
from holdfast.core.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an attempt begins if not at the newest checkpoint; made once per ``name``.

    ``fresh``: at step 0, leaving all checkpoints behind; else at ``step``.
    """

    name: str
    fresh: bool = False
    step: int = 0


class DecisionState(IntEnum):
    """How far metadata has got with a restore; only CONFIRMED never changes."""

    UNSPECIFIED = 0
    PENDING = 1
    PROPOSED = 2
    CONFIRMED = 3
    LOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an attempt should restore; ``fresh``: nothing, it begins at step 0.

    A node is told those of the checkpoint's ``shards`` that its ranks need, the number of all, and
    the ``world_size`` of the attempt that saved it.
    ``refused``: lost only as to what the attempt asked for; others can be restored. ``notes`` are
    the user's of the checkpoint's step: a JSON object, empty: none are known.
    """

    number: int
    state: DecisionState
    generation: int
    fresh: bool = False
    checkpoint: CheckpointId | None = None
    shards: tuple[Shard, ...] = ()
    reason: str = ""
    refused: bool = False
    notes: str = ""
    shards_count: int = 0
    world_size: int = 0
