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


_REASONS = {
    SaveReason.UNSPECIFIED: "no reason given",
    SaveReason.INTERVAL: "the interval is over",
    SaveReason.AUTO: "the interval that pays off is over",
    SaveReason.PREEMPTION: "a rank was told to end",
    SaveReason.USER: "the training script asked for it",
    SaveReason.OPERATOR: "an operator asked for it",
    SaveReason.RESCALE: "the job goes on with another world size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A step that all ranks of an attempt save, and why."""

    step: int
    reason: SaveReason = SaveReason.UNSPECIFIED
