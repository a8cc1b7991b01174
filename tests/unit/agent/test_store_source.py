"""Reading shards from an object store that fails, lies, stops or comes back; bytes in memory."""

from __future__ import annotations

import random
import threading

import pytest

from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast.errors import (
    AccessError,
    CorruptionError,
    DigestMismatchError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format import keys, sidecar
from holdfast.format.digest import PART_BYTES, part_digests, root_digest
from holdfast.objectstore.directory import DirectoryStore
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.agent.store_source import ObjectTier

LENGTH = 3 * PART_BYTES + 5
DATA = random.Random(7).randbytes(LENGTH)
DIGESTS = tuple(part_digests(memoryview(DATA)))
SHARD = Shard(
    id=ShardId("r1", 7, 2, 3), job="team/job", world_size=8, plan_hash="p" * 32,
    length_bytes=LENGTH, root_digest=root_digest(LENGTH, DIGESTS),
)  # fmt: skip
SEGMENT = keys.segment_key(SHARD.job, SHARD.id, SHARD.world_size)
SIDECAR = keys.sidecar_key(SHARD.job, SHARD.id, SHARD.world_size)


class Store(MemoryStore):
    """A store in memory that calls ``before_read`` with where a read begins; it may raise."""

    def __init__(self, data=DATA):
        super().__init__()
        self.reads = []
        self.guard = threading.Lock()
        self.before_read = lambda begin: None
        self.put(SEGMENT, data)
        self.put(SIDECAR, sidecar.encode(sidecar.Sidecar(shard=SHARD, digests=DIGESTS)))

    def read_into(self, key, begin, view):
        with self.guard:
            self.reads.append(begin)
        self.before_read(begin)
        super().read_into(key, begin, view)


def fetch(store, *, done=(), stop=None):
    """Fetch into a buffer that has what is ``done``; returns (buffer, done, digests)."""
    had = set(done)
    buffer = bytearray(LENGTH)
    for index in had:
        buffer[index * PART_BYTES : (index + 1) * PART_BYTES] = DATA[
            index * PART_BYTES : (index + 1) * PART_BYTES
        ]
    tier = ObjectTier("memory:", lambda url: store)
    digests = tier.fetch(SHARD, memoryview(buffer), done=had, stop=stop or threading.Event())
    return buffer, had, digests


def test_a_shard_is_read_whole_with_the_digests_that_its_owner_made():
    """P3, F67"""
    buffer, done, digests = fetch(Store())

    assert (DATA, {0, 1, 2, 3}, b"".join(DIGESTS)) == (bytes(buffer), done, digests)


def test_parts_that_another_source_gave_are_not_read_again():
    store = Store()
    buffer, _, _ = fetch(store, done=(0, 2))

    assert DATA == bytes(buffer)
    assert [PART_BYTES, 3 * PART_BYTES] == sorted(store.reads)


def test_a_store_that_fails_half_way_is_asked_for_the_rest():
    """G22: as long as each time brings something, nothing that came is thrown away."""
    store = Store()

    given = set()

    def only_the_next(begin):
        if begin > len(given) * PART_BYTES:
            raise UnavailableError("503 slow down")
        given.add(begin)

    store.before_read = only_the_next
    buffer, _, _ = fetch(store)

    assert DATA == bytes(buffer)
    assert len(given) == 4


def test_a_store_that_brings_nothing_is_given_up_for_now():
    store = Store()

    def never(begin):
        raise UnavailableError("503 slow down")

    store.before_read = never
    with pytest.raises(UnavailableError, match="503"):
        fetch(store, done=(1,))


def test_a_shutdown_interrupts_a_fetch():
    stop = threading.Event()
    store = Store()

    def stopped(begin):
        stop.set()
        raise UnavailableError("503 slow down")

    store.before_read = stopped
    with pytest.raises(UnavailableError):
        fetch(store, stop=stop)
    assert len(store.reads) <= 4


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DATA[:-1], TruncatedShardError),
        (DATA[: 2 * PART_BYTES], TruncatedShardError),
        (DATA[:-1] + bytes([DATA[-1] ^ 1]), DigestMismatchError),
    ],
)
def test_wrong_bytes_are_the_objects_fault(data, kind):
    with pytest.raises(kind):
        fetch(Store(data))


@pytest.mark.parametrize("key", [SEGMENT, SIDECAR])
def test_a_missing_object_is_the_objects_fault(key):
    store = Store()
    store.delete([key])

    with pytest.raises(CorruptionError, match="no use in memory:"):
        fetch(store)


def test_a_missing_store_is_not(tmp_path):
    """What was in a folder that is not mounted is as good as it ever was."""
    tier = ObjectTier((tmp_path / "gone").as_uri())
    with pytest.raises(NotFoundError):
        tier.fetch(SHARD, memoryview(bytearray(LENGTH)), done=set(), stop=threading.Event())


def test_a_folder_without_the_objects_is_not_a_missing_store(tmp_path):
    DirectoryStore(tmp_path / "empty", make=True)
    tier = ObjectTier((tmp_path / "empty").as_uri())
    with pytest.raises(CorruptionError):
        tier.fetch(SHARD, memoryview(bytearray(LENGTH)), done=set(), stop=threading.Event())
    tier.close()


@pytest.mark.parametrize(
    ("url", "kind"), [("", PreconditionError), ("ftp://somewhere/else", InvalidRequestError)]
)
def test_an_agent_that_was_told_of_no_store_says_what_to_set(url, kind):
    tier = ObjectTier(url)
    with pytest.raises(kind) as caught:
        tier.fetch(SHARD, memoryview(bytearray(LENGTH)), done=set(), stop=threading.Event())

    advice = tier.advice(caught.value)
    assert "HOLDFAST_STORE" in advice
    assert "as for the metadata service" in advice


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (AccessError("expired token"), "credentials"),
        (NotFoundError("no bucket b"), "create the bucket"),
        (UnavailableError("503"), "tries again"),
    ],
)
def test_every_failure_of_a_store_comes_with_what_to_do(error, todo):
    advice = ObjectTier("s3://b").advice(error)

    assert advice.startswith(f"object store s3://b: {error.message}; ")
    assert todo in advice
