"""What an item of the queue asks for. The text is a hint: what it stands for now is asked anew."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import InvalidRequestError


class Kind(StrEnum):
    """The first word of an item."""

    SHARD = "shard"
    MANIFEST = "manifest"
    COLLECT = "collect"
    SCRUB = "scrub"
    ORPHANS = "orphans"


BACKGROUND = frozenset({Kind.SCRUB, Kind.ORPHANS})
"""What may take hours: a worker does one of these at a time, so that drains find a hand free."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item by what is to be done; ``rest`` names the shard or the checkpoint."""

    kind: Kind
    rest: str

    @property
    def text(self) -> str:
        """As it stands in the queue."""
        return f"{self.kind.value}/{self.rest}"


def parse(text: str) -> Item:
    """Return what ``text`` asks for.

    Raises:
        InvalidRequestError: nothing that this version knows.
    """
    word, _, rest = text.partition("/")
    if word not in set(Kind) or not rest:
        raise InvalidRequestError(f"item {text[:80]!r} is of no kind that this worker knows")
    return Item(Kind(word), rest)
