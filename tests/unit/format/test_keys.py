"""Names of objects: written one way, read back, and nothing else is taken for ours (P9)."""

from __future__ import annotations

import pytest

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.errors import InvalidRequestError
from holdfast.format import keys

CHECKPOINT = CheckpointId("r7", 1200, 3)


@pytest.mark.parametrize(
    "key",
    [
        "team/gpt/r7/step-01200.g3/",
        "team/gpt/r7/step-1200.g03/",
        "team/gpt/r7/step-1200/",
        "team/gpt/r7/step-1200.g3.bak/",
        "team/gpt/r7/step-1234567890123456.g3/",
        "team/gpt/r7/step-1200.g12345678901/",
        "team/gpt/r7/step--1.g3/",
        "team/gpt/R7/step-1200.g3/",
        "team/../r7/step-1200.g3/",
        "/r7/step-1200.g3/",
        "//r7/step-1200.g3/",
        "r7/step-1200.g3/",
        "step-1200.g3/",
        "team//gpt/r7/step-1200.g3/",
        "te am/r7/step-1200.g3/",
        "team/gpt/r7/step-\u0661.g3/",
        "team/gpt/r7/step-1200.g3\n/",
        "",
        "/",
    ],
)
def test_what_is_not_spelled_as_ours_is_no_folder(key):
    assert keys.parse_folder(key) is None
    assert keys.folder_place(key) is None


def test_an_object_tells_its_folder_and_only_the_folder_is_it():
    place = keys.Place("team/gpt", CHECKPOINT)
    prefix = "team/gpt/r7/step-1200.g3/"

    assert place == keys.parse_folder(f"{prefix}manifest.json") == keys.folder_place(prefix)
    assert keys.folder_place(f"{prefix}deeper/") is None
    assert keys.folder_place(prefix.rstrip("/")) is None


@pytest.mark.parametrize(
    "stem",
    [
        "shard-00002-of-00002",
        "shard-00000-of-00000",
        "shard-000001-of-00002",
        "shard-1-of-2",
        "shard-00001-of-00002.v0",
        "shard-00001-of-00002.v01",
        "shard-00001-of-00002.v1234567",
        "shard-00001-of-2000000",
        "shard-00001-of-00002.safetensors",
        "../shard-00001-of-00002",
        "shard-00001-of-00002\n",
        "shard-0000\u0661-of-00002",
    ],
)
def test_what_is_not_spelled_as_ours_is_no_shard(stem):
    assert keys.parse_shard_stem(stem, CHECKPOINT) is None


@pytest.mark.parametrize("plan", ["", "A" * 32, "0" * 31, f"x/index-{'0' * 32}", "../" + "0" * 32])
def test_a_plan_that_is_none_becomes_no_key(plan):
    with pytest.raises(InvalidRequestError, match="is not 32 hex digits"):
        keys.index_key("a", "r7", plan)


@pytest.mark.parametrize("number", [CheckpointId("r7", 10**15, 1), CheckpointId("r7", 1, 10**10)])
def test_numbers_that_would_not_be_read_back_become_no_folder(number):
    with pytest.raises(InvalidRequestError, match="out of range"):
        keys.folder("a", number)


@pytest.mark.parametrize(
    ("shard", "world_size"),
    [
        (ShardId("r7", 1, 1, 2), 2),
        (ShardId("r7", 1, 1, -1), 2),
        (ShardId("r7", 1, 1, 0, 10**6), 2),
        (ShardId("r7", 1, 1, 0, -1), 2),
        (ShardId("r7", 1, 1, 0), 10**6 + 1),
    ],
)
def test_shards_that_would_not_be_read_back_get_no_name(shard, world_size):
    with pytest.raises(InvalidRequestError, match="out of range"):
        keys.shard_stem(shard, world_size)


@pytest.mark.parametrize("job", ["", "../up", "a//b", "a/", "/a", "a\x00", "a" * 129])
def test_a_job_name_that_is_none_becomes_no_key(job):
    with pytest.raises(InvalidRequestError, match="job name"):
        keys.manifest_key(job, CHECKPOINT)
