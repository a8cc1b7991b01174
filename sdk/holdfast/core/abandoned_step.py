"""A step that will never be whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedStep:
    """A step that will never be whole in this generation: all drop their segments of it."""

    run: str
    step: int
    generation: int
    reason: str = ""
