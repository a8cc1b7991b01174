"""The names of work in the queue: one grammar for metadata, workers and the supervisor. Pure.

``shard/<run>/<step>/<generation>/<rank>/<volume>`` is one upload. ``manifest``, ``collect`` and
``scrub``, each with ``/<run>/<step>/<generation>``, are about a whole checkpoint. ``orphans/all``
is about the whole bucket. A name is a hint: what it stands for now is asked when it is claimed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.ids import CheckpointId, Generation, ShardId, Step, run_id, shard_id
from holdfast.errors import InvalidRequestError

_ALL = "all"
_NUMBER = re.compile(r"[0-9]{1,18}")


class Kind(StrEnum):
    """The kind of an item: the first word of its name."""

    SHARD = "shard"
    MANIFEST = "manifest"
    COLLECT = "collect"
    SCRUB = "scrub"
    ORPHANS = "orphans"


@dataclass(frozen=True, slots=True)
class Item:
    """An item of the queue: what a worker is asked to do.

    Invariants:
        * ``shard`` is set for ``SHARD`` alone, and is one of ``checkpoint``.
        * ``checkpoint`` is None for ``ORPHANS`` alone.
    """

    kind: Kind
    checkpoint: CheckpointId | None = None
    shard: ShardId | None = None


ORPHANS = Item(Kind.ORPHANS)


def shard_item(shard: ShardId) -> Item:
    """Return the item of one shard's upload."""
    return Item(Kind.SHARD, shard.checkpoint, shard)


def text(item: Item) -> str:
    """Return the item's name in the queue."""
    if item.shard is not None:
        return f"{item.kind.value}/{item.shard.key}"
    key = item.checkpoint
    if key is None:
        return f"{item.kind.value}/{_ALL}"
    return f"{item.kind.value}/{key.run}/{key.step}/{key.generation}"


def prefix(kind: Kind) -> str:
    """Return how every name of the kind begins, and no other."""
    return f"{kind.value}/"


def parse(name: str) -> Item:
    """Return the item that has this ``name``.

    Raises:
        InvalidRequestError: it is no name of an item that this version knows.
    """
    word, _, rest = name.partition("/")
    if word == Kind.SHARD:
        return shard_item(shard_id(rest))
    if name == text(ORPHANS):
        return ORPHANS
    parts = rest.split("/")
    # Longer ones are no number of a database, and fail there each time that they are asked for.
    numbers = len(parts) == 3 and all(_NUMBER.fullmatch(part) for part in parts[1:])
    known = word in set(Kind) - {Kind.ORPHANS}
    if not known or not numbers:
        raise InvalidRequestError(f"{name[:80]!r} is not the name of an item of the queue")
    key = CheckpointId(run_id(parts[0]), Step(int(parts[1])), Generation(int(parts[2])))
    return Item(Kind(word), key)
