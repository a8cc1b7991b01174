"""What to do about an object that is there already: nothing, prove it, or write it again."""

from __future__ import annotations

from enum import Enum

from holdfast.core.shard import Shard


class Verdict(Enum):
    """What an object under a shard's name is worth."""

    DONE = "done"
    """The object and its sidecar are there: nothing to do."""

    PROVE = "prove"
    """It has the length and no sidecar: whoever wrote it died before verifying it."""

    WRITE = "write"
    """Nothing of use is there."""


def judge(
    shard: Shard, length_bytes: int | None, sidecar: Shard | None, *, repair: bool
) -> Verdict:
    """Return what to do about the object under the name of ``shard``.

    Args:
        shard: As the catalogue knows it.
        length_bytes: Of the object; None when there is none.
        sidecar: The shard that the sidecar beside it speaks of; None when there is none, or it
            cannot be read.
        repair: What lies there is known to be bad.
    """
    if repair or length_bytes != shard.length_bytes:
        return Verdict.WRITE
    return Verdict.DONE if sidecar == shard else Verdict.PROVE
