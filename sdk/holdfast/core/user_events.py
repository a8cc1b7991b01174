"""What happened, told to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EVENTS_PER_CALL_MAX = 100
"""How many events a call may bring; who has more brings them one call after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event for people; no decision depends on it."""

    kind: str
    severity: str
    message: str
    job: str = ""
    context: Mapping[str, str] = field(default_factory=dict)
