"""What a holder says of its copy is checked before a byte is fetched (P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.errors import DigestMismatchError
from holdfast.format.digest import PART_BYTES, part_digests, root_digest
from holdfast_services.transport.located import Located

BYTES = bytes(PART_BYTES) + b"the rest"
DIGESTS = tuple(part_digests(memoryview(BYTES)))
SHARD = Shard(
    id=ShardId(RunId("r1"), Step(7), Generation(1), Rank(0)),
    job="job",
    world_size=1,
    plan_hash="p",
    length_bytes=len(BYTES),
    root_digest=root_digest(len(BYTES), DIGESTS),
)
GOOD = Located(shard=SHARD, slot_incarnation=4, part_digests=b"".join(DIGESTS))


def test_a_copy_that_is_the_wanted_one_is_taken():
    GOOD.check(SHARD)

    assert DIGESTS == GOOD.digests


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, shard=replace(SHARD, length_bytes=1)),
        replace(GOOD, shard=replace(SHARD, root_digest=bytes(16))),
        replace(GOOD, part_digests=b"".join(reversed(DIGESTS))),
        replace(GOOD, part_digests=DIGESTS[0]),
        replace(GOOD, part_digests=b"".join(DIGESTS)[:-1]),
        replace(GOOD, part_digests=b""),
    ],
)
def test_a_copy_of_something_else_is_refused(other):
    with pytest.raises(DigestMismatchError, match="r1/7/1/0/0 is another segment there"):
        other.check(SHARD)
