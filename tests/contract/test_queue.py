"""One suite over every queue: what ``holdfast_services.kit.queue`` promises, it keeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.contract.queues import LONG_S, WAIT_S_MAX, claim_one

from holdfast.errors import InvalidRequestError
from holdfast_services.kit.queue import ITEM_LENGTH_MAX, open_queue
from holdfast_services.kit.queue.memory import MemoryQueue

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 0.2

# argv: url, lease. Claims one, says which, waits for a line, then does all that is left.
WORKER = """
import sys
from holdfast_services.kit.queue import open_queue
queue = open_queue(sys.argv[1], lease_s=float(sys.argv[2]))
claims = queue.claim("process", count_max=1, wait_s=30.0)
print(claims[0].item, flush=True)
sys.stdin.readline()
while claims:
    queue.acknowledge(claims[0])
    claims = queue.claim("process", count_max=1, wait_s=0.2)
    print(*(claim.item for claim in claims), flush=True)
"""


class Place:
    """A queue's place: opens it, passes a lease, loses what is in it."""

    def __init__(self, url: str, lose) -> None:
        self.url = url
        self.lose = lose
        self._opened = []

    def open(self, lease_s=LONG_S):
        queue = open_queue(self.url, lease_s=lease_s)
        self._opened.append(queue)
        return queue

    def pass_s(self, length_s: float) -> None:
        """Real clocks pass by themselves: who needs it waits in ``claim``."""

    def close(self):
        for queue in self._opened:
            queue.close()


class MemoryPlace(Place):
    """One object for all who open it, with a clock of our own."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue = MemoryQueue(lease_s=LONG_S, clock=lambda: self._now_s)
        super().__init__("memory:", self._queue.forget)

    def open(self, lease_s=LONG_S):
        self._queue._lease_s = lease_s
        return self._queue

    def pass_s(self, length_s: float) -> None:
        self._now_s += length_s


@pytest.fixture(params=["memory", "sqlite", "redis"])
def place(request, tmp_path):
    opened = made(request, tmp_path)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "redis"])
def shared_place(request, tmp_path):
    opened = made(request, tmp_path)
    yield opened
    opened.close()


def made(request, tmp_path) -> Place:
    if request.param == "memory":
        return MemoryPlace()
    if request.param == "sqlite":

        def lose():
            opened.close()
            for file in tmp_path.glob("queue.db*"):
                file.unlink()

        opened = Place(f"sqlite:///{tmp_path / 'queue.db'}", lose)
        return opened
    url = request.getfixturevalue("redis_url")
    server = request.getfixturevalue("redis_server")
    return Place(url, lambda: server.ask("FLUSHALL"))


def started(url, lease_s=LONG_S):
    paths = os.pathsep.join((str(ROOT / "sdk"), str(ROOT / "services")))
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, url, str(lease_s)],
        env={**os.environ, "PYTHONPATH": paths}, stdin=-1, stdout=-1, text=True,
    )  # fmt: skip


def test_items_come_in_the_order_they_were_offered(place):
    queue = place.open()

    assert queue.offer(["b", "a"]) == 2
    assert queue.offer(["c"]) == 1
    assert [c.item for c in queue.claim("w", count_max=2, wait_s=0)] == ["b", "a"]
    assert [c.item for c in queue.claim("w", count_max=2, wait_s=0)] == ["c"]
    assert list(queue.claim("w", count_max=2, wait_s=0)) == []


def test_an_item_that_is_there_is_not_added_again_until_it_is_done(place):
    """Waiting, claimed, delayed; the reconcile loop offers all that is due each time."""
    queue = place.open()

    assert queue.offer(["a", "a"]) == 1
    assert queue.offer(["a"]) == 0
    claim = claim_one(queue)
    assert queue.offer(["a"]) == 0
    queue.release(claim, delay_s=LONG_S)
    assert queue.offer(["a", "b"]) == 1
    other = claim_one(queue)
    queue.acknowledge(other)

    assert other.item == "b"
    assert queue.offer(["b", "a"]) == 1
    assert claim_one(queue).deliveries == 1


def test_a_wait_ends_with_what_is_offered_meanwhile(place):
    queue = place.open()
    found = []
    waiter = threading.Thread(target=lambda: found.append(claim_one(queue)))
    waiter.start()
    place.open().offer(["late"])
    waiter.join(WAIT_S_MAX)

    assert [claim.item for claim in found] == ["late"]


def test_each_item_goes_to_exactly_one_of_eight_threads(place):
    """F85: two workers never do the same while both live."""
    queue = place.open()
    items = [f"item-{i}" for i in range(240)]
    queue.offer(items)
    done: list[str] = []

    def work(name):
        while len(done) < len(items):
            for claim in queue.claim(name, count_max=3, wait_s=0.05):
                done.append(claim.item)
                queue.acknowledge(claim)

    threads = [threading.Thread(target=work, args=(f"w{i}",), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)

    assert Counter(items) == Counter(done)
    assert (queue.waiting_count(), queue.items_count()) == (0, 0)


def test_each_item_goes_to_exactly_one_of_three_processes(shared_place):
    """Each holds one before any goes on, so all three take part."""
    queue = shared_place.open()
    items = [f"item-{i}" for i in range(60)]
    workers = [started(shared_place.url) for _ in range(3)]
    queue.offer(items)
    first = [worker.stdout.readline() for worker in workers]
    rest = [worker.communicate("\n", timeout=WAIT_S_MAX)[0] for worker in workers]

    assert Counter(items) == Counter("".join(first + rest).split())
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert (queue.waiting_count(), queue.items_count()) == (0, 0)


def test_what_a_killed_process_held_is_taken_over_after_its_lease(shared_place):
    """G10: SIGKILL between claim and acknowledge."""
    queue = shared_place.open(SHORT_S)
    with started(shared_place.url, SHORT_S) as worker:
        queue.offer(["a"])
        assert worker.stdout.readline() == "a\n"
        worker.kill()
    claim = claim_one(queue)

    assert (claim.item, claim.deliveries) == ("a", 2)


def test_a_silent_workers_items_are_taken_over_and_deliveries_counted(place):
    queue = place.open(SHORT_S)
    queue.offer(["a", "b"])
    queue.claim("dead", count_max=2, wait_s=0)
    taken = []
    for deliveries in (2, 3):
        place.pass_s(2 * SHORT_S)
        taken.append({claim_one(queue).item, claim_one(queue, "other").item})
        assert (queue.waiting_count(), queue.items_count()) == (0, 2), deliveries
    place.pass_s(2 * SHORT_S)
    claim = claim_one(queue)

    assert taken == [{"a", "b"}, {"a", "b"}]
    assert claim.deliveries == 4


def test_a_slow_worker_that_beats_keeps_its_claim(place):
    lease_s = 3.0
    queue = place.open(lease_s)
    queue.offer(["slow"])
    claim = claim_one(queue, "slow")
    deadline_s = time.monotonic() + (0.2 if isinstance(place, MemoryPlace) else 2.0)
    while time.monotonic() < deadline_s:
        assert list(queue.heartbeat("slow", [claim])) == []
        place.pass_s(0.6 * lease_s)
        assert list(queue.claim("other", count_max=1, wait_s=0.1)) == []
    queue.acknowledge(claim)

    assert queue.offer(["slow"]) == 1


def test_a_late_worker_whose_item_nobody_took_goes_on(place):
    queue = place.open(SHORT_S)
    queue.offer(["a", "b"])
    late, kept = queue.claim("late", count_max=2, wait_s=0)
    place.pass_s(2 * SHORT_S)
    # Both leases are over once one of them can be taken over.
    taken = claim_one(queue, "other")
    mine = kept if taken.item == "a" else late

    assert list(queue.heartbeat("late", [mine])) == []
    queue.acknowledge(mine)
    assert queue.offer([mine.item]) == 1


def test_who_was_taken_over_learns_it_and_cannot_undo_the_others_work(place):
    """P2 in small: the late one's acknowledge and release count for nothing."""
    queue = place.open(SHORT_S)
    queue.offer(["a"])
    old = claim_one(queue, "same name")
    place.pass_s(2 * SHORT_S)
    new = claim_one(queue, "same name")

    assert new.token != old.token
    assert list(queue.heartbeat("same name", [old, new])) == [old]
    queue.acknowledge(old)
    queue.release(old, delay_s=0)
    assert (queue.waiting_count(), queue.items_count()) == (0, 1)
    assert list(queue.heartbeat("same name", [new])) == []
    queue.acknowledge(new)
    assert (queue.waiting_count(), queue.items_count()) == (0, 0)


def test_an_old_claim_does_not_end_a_new_one_of_the_same_item(place):
    queue = place.open()
    queue.offer(["a"])
    old = claim_one(queue)
    queue.acknowledge(old)
    queue.offer(["a"])
    new = claim_one(queue)
    queue.acknowledge(old)

    assert list(queue.heartbeat("w", [old, new])) == [old]
    assert queue.items_count() == 1


def test_a_released_item_goes_to_the_end_and_keeps_its_count(place):
    queue = place.open()
    queue.offer(["a", "b"])
    queue.release(claim_one(queue), delay_s=0)
    second, third = queue.claim("w", count_max=2, wait_s=0)

    assert (second.item, second.deliveries) == ("b", 1)
    assert (third.item, third.deliveries) == ("a", 2)


def test_a_delayed_item_is_nobodys_until_it_is_due(place):
    queue = place.open()
    queue.offer(["far", "near"])
    far, near = queue.claim("w", count_max=2, wait_s=0)
    queue.release(far, delay_s=LONG_S)
    queue.release(near, delay_s=SHORT_S)

    assert queue.waiting_count() == 2
    place.pass_s(2 * SHORT_S)
    again = claim_one(queue)
    assert (again.item, again.deliveries) == ("near", 2)
    assert list(queue.claim("w", count_max=1, wait_s=0)) == []
    assert (queue.waiting_count(), queue.items_count()) == (1, 2)


def test_items_are_counted_by_how_they_begin(place):
    queue = place.open()
    queue.offer(["shard/1", "shard/2", "shard/3", "manifest/1", "shar%", "Shard/1"])
    queue.release(claim_one(queue), delay_s=LONG_S)
    claim_one(queue)

    counts = [queue.items_count(prefix) for prefix in ("shard/", "manifest/", "shar%", "x", "")]
    assert counts == [3, 1, 1, 0, 6]
    assert queue.waiting_count() == 5


def test_an_item_of_full_length_passes_and_others_are_refused(place):
    queue = place.open()
    longest = "shard/" + "x y" * 90
    longest = longest[:ITEM_LENGTH_MAX]
    for wrong in ("", "x" * (ITEM_LENGTH_MAX + 1)):
        with pytest.raises(InvalidRequestError):
            queue.offer(["fine", wrong])
    queue.offer([longest])
    queue.release(claim_one(queue), delay_s=0.001)
    place.pass_s(1)

    assert claim_one(queue).item == longest


def test_a_queue_that_lost_everything_says_so_and_goes_on(place):
    """The epoch tells; old claims do no harm; what is offered again is done again."""
    queue = place.open()
    queue.offer(["claimed", "delayed", "waiting"])
    claimed, delayed = queue.claim("w", count_max=2, wait_s=0)
    queue.release(delayed, delay_s=LONG_S)
    before = queue.epoch()
    assert queue.epoch() == place.open().epoch() == before
    place.lose()
    queue = place.open()

    assert queue.epoch() != before
    assert list(queue.heartbeat("w", [claimed])) == [claimed]
    assert queue.offer(["claimed", "delayed", "waiting"]) == 3
    queue.acknowledge(claimed)
    queue.release(claimed, delay_s=0)
    assert queue.waiting_count() == 3
    assert len(queue.claim("w", count_max=4, wait_s=0)) == 3


@pytest.mark.parametrize(
    "url", ["amqp://h/1", "sqlite:///relative.db", "queue.db", "", "redis://h/?db=x"]
)
def test_a_url_of_another_kind_is_refused_without_repeating_it(url):
    with pytest.raises(InvalidRequestError):
        open_queue(url, lease_s=LONG_S)
