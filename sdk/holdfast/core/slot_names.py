"""Slots of an agent's arena: their states and their file names.

A slot is one tmpfs file, reused. Its state is in its name, so that a rename is the transition
and a restarted agent reads all states from one directory listing::

    free ──► open ──► closed ──► seg ──► free        (``open`` is the state *writing*)

A slot that holds an element of parity goes from open to *elem* and back to free.

A *partial* slot is apart from that: a new, sparse file with some parts of one segment, for ranks
of this node that are about to load them. It is served to nobody, never reused, and removed by the
next agent.

Every reuse grows the *incarnation*, which is part of the name: a process that wakes up late
renames a name that no longer exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import InvalidRequestError


class SlotState(StrEnum):
    """The suffix of the slot's file."""

    FREE = "free"
    WRITING = "open"
    CLOSED = "closed"
    SEALED = "seg"
    ELEMENT = "elem"
    PARTIAL = "part"


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.WRITING}),
    SlotState.WRITING: frozenset({SlotState.CLOSED, SlotState.ELEMENT, SlotState.FREE}),
    SlotState.CLOSED: frozenset({SlotState.SEALED, SlotState.FREE}),
    SlotState.SEALED: frozenset({SlotState.FREE}),
    SlotState.ELEMENT: frozenset({SlotState.FREE}),
    SlotState.PARTIAL: frozenset(),
}

_NAME = re.compile(r"(s[0-9]{1,9})\.([0-9]{1,18})\.(free|open|closed|seg|elem|part)")


@dataclass(frozen=True, slots=True)
class SlotName:
    """``<slot>.<incarnation>.<state>``, as it stands in the arena's folder."""

    slot: str
    incarnation: int
    state: SlotState

    @property
    def file_name(self) -> str:
        """The name of the file, within the arena's folder."""
        return f"{self.slot}.{self.incarnation}.{self.state.value}"

    @property
    def sidecar_name(self) -> str:
        """The name of the digest file that goes with a sealed slot."""
        return f"{self.slot}.{self.incarnation}.sum"

    def to(self, state: SlotState) -> SlotName:
        """Return the name after the transition to ``state``; reuse grows the incarnation.

        Raises:
            ValueError: there is no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"slot {self.file_name} cannot become {state.value}")
        reuse = state is SlotState.WRITING
        return SlotName(self.slot, self.incarnation + reuse, state)


def slot_name(file_name: str) -> SlotName:
    """Parse a file name of the arena.

    Raises:
        InvalidRequestError: it is not the name of a slot.
    """
    match = _NAME.fullmatch(file_name)
    if not match:
        raise InvalidRequestError(f"{file_name[:80]!r} is not a slot's file name")
    return SlotName(match[1], int(match[2]), SlotState(match[3]))
