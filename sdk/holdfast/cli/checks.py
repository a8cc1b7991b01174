"""One check of ``doctor``: its result, and advice if it fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: ``level`` is ok, warn or fail; ``advice`` is empty when it is ok."""

    name: str
    level: str
    found: str
    advice: str = ""


def check(name: str, good: bool, found: str, advice: str, *, bad: str = "warn") -> Check:
    """Return the line: ok, or ``bad`` with its advice."""
    return Check(name=name, level="ok" if good else bad, found=found, advice="" if good else advice)
