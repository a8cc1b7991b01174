"""How a checkpoint came about (G19): the attempts that led to it, one from the other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.ids import CheckpointId
from holdfast.core.origin import Origin
from holdfast_services.metadata.domain.rollback import Rollback

ANCESTORS_SHOWN_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """How one attempt began; ``parent`` is what it had restored, None: step 0.

    ``confirmed``: that is settled. Of what the bucket alone knows there is no time.
    """

    generation: int
    origin: Origin
    at_s: float | None = None
    holder: str = ""
    world_size: int = 0
    confirmed: bool = False
    parent: CheckpointId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """An attempt on the line of a checkpoint, and the rollback that had it begin where it did."""

    beginning: Beginning
    rollback: Rollback | None = None


def ancestors(
    generation: int,
    beginning: Callable[[int], Beginning | None],
    rollbacks: Sequence[Rollback],
) -> tuple[Ancestor, ...]:
    """Return the attempts that led to what ``generation`` saved, the last first, a bounded number.

    Args:
        generation: Of the checkpoint.
        beginning: Looks one up.
        rollbacks: Those of the run.
    """
    found: list[Ancestor] = []
    while len(found) < ANCESTORS_SHOWN_MAX:
        began = beginning(generation)
        if began is None:
            break
        back = max(
            (
                one
                for one in rollbacks
                if one.to == began.parent and one.generation < began.generation
            ),
            key=lambda one: one.generation,
            default=None,
        )
        found.append(Ancestor(beginning=began, rollback=back))
        # Generations fall: what a row says wrongly ends, and never goes round in circles.
        if began.parent is None or began.parent.generation >= generation:
            break
        generation = began.parent.generation
    return tuple(found)
