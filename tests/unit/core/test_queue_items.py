"""The grammar of the queue: one for all who write or read it (G10)."""

import pytest

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.queue_items import ORPHANS, Item, Kind, parse, prefix, shard_item, text
from holdfast.errors import InvalidRequestError

KEY = CheckpointId("0123456789ab", 10, 1)
SHARD = ShardId("0123456789ab", 10, 1, 3, 2)
NAMES = [
    ("shard/0123456789ab/10/1/3/2", shard_item(SHARD)),
    ("manifest/0123456789ab/10/1", Item(Kind.MANIFEST, KEY)),
    ("collect/0123456789ab/10/1", Item(Kind.COLLECT, KEY)),
    ("scrub/0123456789ab/10/1", Item(Kind.SCRUB, KEY)),
    ("orphans/all", ORPHANS),
]


@pytest.mark.parametrize(("name", "item"), NAMES)
def test_an_item_is_read_as_it_is_written(name, item):
    assert item == parse(name)
    assert name == text(item)
    assert name.startswith(prefix(item.kind))


def test_an_item_of_a_shard_is_about_its_checkpoint():
    assert (KEY, SHARD) == (shard_item(SHARD).checkpoint, shard_item(SHARD).shard)


@pytest.mark.parametrize(
    "name",
    ["", "/", "shard", "shard/", "shard/r/1/2", "SHARD/r/1/2/0/0", "paint/r1", "burn/r/1/2",
     "manifest/r/1", "manifest/r/-1/2", "manifest/r/1/2/3", "manifest/../1/2", "scrub/r/\u00b2/1",
     "manifest/r/" + "9" * 90 + "/1", "collect/r/" + "9" * 30 + "/1", "scrub/r/1/" + "9" * 19,
     "orphans", "orphans/", "orphans/r/1/2", "orphans/all/1"],
)  # fmt: skip
def test_other_names_are_refused(name):
    """P9: what lies in the queue may be anything."""
    with pytest.raises(InvalidRequestError):
        parse(name)
