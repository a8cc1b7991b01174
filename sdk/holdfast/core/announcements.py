"""The steps that all ranks of an attempt are told to save, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class SaveReason(IntEnum):
    """Why all ranks save a step that no rule of step numbers names."""

    UNSPECIFIED = 0
    INTERVAL = 1
    AUTO = 2
    PREEMPTION = 3
    USER = 4
    OPERATOR = 5
    RESCALE = 6

    @property
    def text(self) -> str:
        """The reason as people read it."""
        return _REASONS[self]

    @property
    def ends_round(self) -> bool:
        """Whether all ranks end once the step is safe: one that has saved it waits for that."""
        return self is SaveReason.RESCALE


_REASONS = {
    SaveReason.UNSPECIFIED: "no reason given",
    SaveReason.INTERVAL: "the interval is over",
    SaveReason.AUTO: "the interval that pays off is over",
    SaveReason.PREEMPTION: "a rank was told to end",
    SaveReason.USER: "the training script asked for it",
    SaveReason.OPERATOR: "an operator asked for it",
    SaveReason.RESCALE: "all ranks go on from it in another round",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A step that all ranks of an attempt save, and why.

    The reason may change until a rank has done the step, and after; the step does not.
    """

    step: int
    reason: SaveReason = SaveReason.UNSPECIFIED
