"""A mutant: the product without one of its guards, as changes to the text of its files."""

from __future__ import annotations

from dataclasses import dataclass

SERVICES = "services/holdfast_services"


@dataclass(frozen=True, slots=True)
class Change:
    """Text of one file that becomes another; ``old`` is there once."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A product that lacks a guard; ``takes`` says for people which."""

    name: str
    takes: str
    changes: tuple[Change, ...]


def mutant(name: str, takes: str, *changes: tuple[str, str, str]) -> Mutant:
    """Return a mutant; a change is (file below the services, or from ``sdk/`` on, old, new)."""
    rooted = (("" if path.startswith("sdk/") else f"{SERVICES}/") + path for path, _, _ in changes)
    made = (Change(path, old, new) for path, (_, old, new) in zip(rooted, changes, strict=True))
    return Mutant(name, takes, tuple(made))
