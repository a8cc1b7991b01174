"""What happens to a Redis server, or to a file, under a queue costs no item."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing

import pytest
import redis
from tests.contract.queues import LONG_S, WAIT_S_MAX, claim_one
from tests.servers.redis import running_redis

from holdfast.cli import doctor_store
from holdfast.errors import UnavailableError
from holdfast_services.kit.queue import Claim, open_queue
from holdfast_services.kit.queue import redis as adapter
from holdfast_services.kit.queue import sqlite as sqlite_adapter


def test_a_clock_that_steps_back_hides_no_item_in_a_file(tmp_path):
    """A laptop's clock is set back by a day: what rests, and what a dead worker had, comes soon."""
    path = tmp_path / "queue.db"
    queue = open_queue(f"sqlite:///{path}", lease_s=LONG_S)
    queue.offer(["resting", "claimed", "kept"])
    resting, _, _ = queue.claim("dead", count_max=3, wait_s=0)
    queue.release(resting, delay_s=LONG_S)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE items SET due_s = due_s + 86400 WHERE item != 'kept'")
        connection.commit()
    found = queue.claim("w", count_max=9, wait_s=0)
    queue.close()

    assert {"resting", "claimed"} == {claim.item for claim in found}


def test_a_clock_that_steps_back_hides_no_resting_item_in_redis(redis_url):
    queue = open_queue(redis_url, lease_s=LONG_S)
    queue.offer(["resting"])
    queue.release(claim_one(queue), delay_s=LONG_S)
    assert [] == list(queue.claim("w", count_max=1, wait_s=0))
    with redis.Redis.from_url(redis_url) as bare:
        bare.zincrby("holdfast:queue:delayed", 86_400_000, "1 resting")
    found = claim_one(queue)
    queue.close()

    assert ("resting", 2) == (found.item, found.deliveries)


def test_a_clock_that_steps_back_keeps_nothing_a_dead_workers_in_redis():
    """G10; defect Q1: claims of an hour that has not come yet are over with their lease."""
    with running_redis(clock=True) as server:
        server.set_clock(3600)
        queue = open_queue(server.url, lease_s=1.0)
        queue.offer([f"item-{i:04}" for i in range(2 * adapter.PENDING_PAGE + 1)])
        dead = queue.claim("dead", count_max=9999, wait_s=0)
        kept = dead[7]
        server.set_clock(0)
        found: list[Claim] = []
        deadline_s = time.monotonic() + WAIT_S_MAX
        while len(found) < len(dead) - 1 and time.monotonic() < deadline_s:
            assert list(queue.heartbeat("dead", [kept])) == []
            found += queue.claim("w", count_max=9999, wait_s=0.1)
        queue.close()

    assert {claim.item for claim in dead} - {kept.item} == {claim.item for claim in found}
    assert {2} == {claim.deliveries for claim in found}


@pytest.mark.parametrize("key", ["items", "known", "delayed", "epoch", "clock"])
def test_a_redis_that_evicts_one_key_begins_anew(redis_url, key):
    """M8; defect Q2: with allkeys-lru one of them goes; no item is lost for good or held twice."""
    queue = open_queue(redis_url, lease_s=LONG_S)
    queue.offer(["resting", "claimed", "waiting"])
    resting, claimed = queue.claim("w", count_max=2, wait_s=0)
    queue.release(resting, delay_s=LONG_S)
    before = queue.epoch()
    with redis.Redis.from_url(redis_url) as bare:
        assert bare.delete(f"holdfast:queue:{key}")

    assert queue.epoch() != before
    assert list(queue.heartbeat("w", [claimed])) == [claimed]
    assert queue.offer(["resting", "claimed", "waiting"]) == 3
    assert (queue.waiting_count(), queue.items_count()) == (3, 3)
    assert len(queue.claim("w", count_max=9, wait_s=0)) == 3
    queue.close()


def test_a_redis_that_may_evict_keys_is_named(redis_server, redis_url, caplog):
    """Defect Q2: by the service when it starts, not at every call; and by ``doctor``."""
    for policy, warned in (("volatile-lru", 0), ("allkeys-lru", 1)):
        with redis.Redis.from_url(redis_url) as bare:
            bare.config_set("maxmemory-policy", policy)
            bare.config_set("maxmemory", 64 << 20)
        queue = open_queue(redis_url, lease_s=LONG_S)
        queue.epoch()
        queue.epoch()
        queue.close()
        assert warned == caplog.text.count(f"maxmemory-policy {policy}")
        assert (policy if warned else "") == doctor_store._ask_queue(redis_url).split(" ")[-1]
    redis_server.kill()
    redis_server.start()


@pytest.mark.parametrize("error", [UnicodeEncodeError, KeyboardInterrupt])
def test_an_error_in_a_change_locks_nobody_out_of_the_file(tmp_path, monkeypatch, error):
    """Defect Q3: whatever breaks a transaction off, the next user of the file does not wait."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    broken, other = (open_queue(url, lease_s=LONG_S) for _ in range(2))
    broken.offer(["kept"])
    # A lone surrogate is no UTF-8; an interrupt comes wherever it does, here while items are read.
    items = ["fine", "\ud800"] if error is UnicodeEncodeError else Interrupted(["fine", "late"])
    with pytest.raises(error):
        broken.offer(items)
    monkeypatch.setattr(sqlite_adapter, "LOCK_S_MAX", 0.0)

    assert other.offer(["a"]) == 1
    assert other.items_count() == broken.items_count() == 2
    broken.close()
    other.close()


class Interrupted(list):
    """Items that somebody interrupts the reading of, the second time they are read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        for item in super().__iter__():
            if self.reads > 1 and item == "late":
                raise KeyboardInterrupt
            yield item


def test_a_redis_that_was_restarted_empty_is_used_on(redis_server, redis_url):
    """Redis loses nothing that cannot be offered again: no call has to be repeated."""
    queue = open_queue(redis_url, lease_s=LONG_S)
    queue.offer(["a", "b"])
    claim, before = claim_one(queue), queue.epoch()
    redis_server.kill()
    for call in (
        queue.epoch,
        queue.waiting_count,
        lambda: queue.offer(["a"]),
        lambda: queue.claim("w", count_max=1, wait_s=1),
        lambda: queue.heartbeat("w", [claim]),
        lambda: queue.acknowledge(claim),
        lambda: queue.release(claim, delay_s=0),
    ):
        with pytest.raises(UnavailableError):
            call()
    redis_server.start()

    assert list(queue.heartbeat("w", [claim])) == [claim]
    assert queue.epoch() != before
    assert queue.offer(["a", "b"]) == 2
    assert claim_one(queue).item == "a"
    queue.close()


def test_a_blocked_claimer_outlives_the_emptying_of_redis(redis_server, redis_url):
    queue = open_queue(redis_url, lease_s=LONG_S)
    found = []
    waiter = threading.Thread(target=lambda: found.append(claim_one(queue)))
    waiter.start()
    deadline_s = time.monotonic() + WAIT_S_MAX
    while b"blocked_clients:0" in redis_server.ask("INFO clients"):
        assert time.monotonic() < deadline_s
    redis_server.ask("FLUSHALL")
    queue.offer(["a"])
    waiter.join(WAIT_S_MAX)
    queue.close()

    assert [claim.item for claim in found] == ["a"]


def test_a_redis_whose_group_alone_was_removed_begins_anew(redis_url):
    queue = open_queue(redis_url, lease_s=LONG_S)
    queue.offer(["a"])
    before = queue.epoch()
    with redis.Redis.from_url(redis_url) as bare:
        bare.xgroup_destroy("holdfast:queue:items", "workers")

    assert list(queue.claim("w", count_max=1, wait_s=0)) == []
    assert queue.epoch() != before
    assert queue.offer(["a"]) == 1
    assert claim_one(queue).item == "a"
    queue.close()


def test_redis_keeps_nothing_of_what_is_done(redis_url, monkeypatch):
    """Bounded: neither entries, nor names of items, nor those of workers long gone."""
    queue = open_queue(redis_url, lease_s=LONG_S)
    queue.offer([f"item-{i}" for i in range(1200)])
    for name in ("one", "two"):
        for claim in queue.claim(name, count_max=600, wait_s=0):
            queue.acknowledge(claim)
    monkeypatch.setattr(adapter, "WORKER_SILENT_MS_MAX", -1)
    later = open_queue(redis_url, lease_s=LONG_S)
    later.claim("three", count_max=1, wait_s=0)
    later.close()
    queue.close()

    with redis.Redis.from_url(redis_url, decode_responses=True) as bare:
        assert bare.xlen("holdfast:queue:items") == 0
        assert sorted(bare.keys()) == sorted(adapter._KEYS)
        assert (bare.hlen("holdfast:queue:known"), bare.zcard("holdfast:queue:delayed")) == (1, 1)
        assert bare.xinfo_consumers("holdfast:queue:items", "workers") == []


def test_a_file_that_cannot_be_opened_is_unavailable_until_it_can(tmp_path):
    folder = tmp_path / "later"
    queue = open_queue(f"sqlite:///{folder / 'queue.db'}", lease_s=LONG_S)
    with pytest.raises(UnavailableError, match="unable to open"):
        queue.offer(["a"])
    folder.mkdir()

    assert queue.offer(["a"]) == 1
    queue.close()
