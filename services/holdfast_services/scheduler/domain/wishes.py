"""A plan as it is kept: what each job should have, and why, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Wished:
    """What a plan wishes a job to have: GPUs by node, and the reason. ``id``: of its submission."""

    id: str
    gpus: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """One plan: ``number`` is its own, ``policy`` made it, ``by_job`` is what it says.

    ``arrivals``: who had GPUs kept them, and the others were dealt what was free.
    """

    number: int = 0
    made_at_s: float = 0.0
    policy: str = ""
    took_s: float = 0.0
    by_job: Mapping[str, Wished] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arrivals: bool = False
