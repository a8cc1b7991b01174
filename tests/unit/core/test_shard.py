"""Whether what ranks save adds up, as the digits in their plan hashes say."""

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import PRIME, Shard, unlike_ranks
from holdfast.format.tally import encode


def shard(rank, tally):
    return Shard(
        id=ShardId(RunId("r1"), Step(1), Generation(1), Rank(rank)), job="j", world_size=2,
        plan_hash=f"9f2c-{tally}.77", length_bytes=64, root_digest=b"",
    )  # fmt: skip


def test_tallies_that_add_up_to_nothing_are_of_a_whole_state_and_others_are_not():
    assert unlike_ranks([shard(0, encode(5)), shard(1, encode(-5))]) == ""
    assert "leave a hole" in unlike_ranks([shard(0, encode(5)), shard(1, encode(PRIME - 4))])


@pytest.mark.parametrize(
    "digits",
    [
        "", "5", "0000000000005", "000000000000005", "0x000000000005", "+0000000000005",
        "0000000000_005", " 0000000000005", "0000000000005\n", "0000000000000A", "\u0660" * 14,
        "-0000000000005", "0000000000000g",
    ],
)  # fmt: skip
def test_what_is_not_written_as_the_format_writes_it_is_no_tally(digits):
    """Nothing that only looks like a number is counted."""
    assert unlike_ranks([shard(0, digits), shard(1, encode(1))]) == ""
