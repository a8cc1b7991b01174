"""The threads that move parts, their memory, and the rate that they keep."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import StoppedError
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence.pool import PartPool

THREADS = 3
WAIT_S = 20


@pytest.fixture
def pool():
    made = PartPool(THREADS)
    yield made
    made.close()


def test_all_items_are_done_and_as_many_at_once_as_there_are_threads(pool):
    """P8: parts in flight are bounded, and the bound is used."""
    together = threading.Barrier(THREADS)

    def work(item):
        together.wait(WAIT_S)
        return item * item

    assert [n * n for n in range(4 * THREADS)] == sorted(pool.each(work, range(4 * THREADS)))


def test_the_first_error_ends_it_and_nothing_is_under_way_afterwards(pool):
    busy, begun = set(), []

    def work(item):
        busy.add(item)
        begun.append(item)
        try:
            if item == 4:
                raise ValueError(item)
        finally:
            busy.discard(item)

    with pytest.raises(ValueError, match="4"):
        pool.each(work, range(1000))

    assert set() == busy
    assert len(begun) < 1000
    assert [1] == pool.each(lambda item: item, [1]), "the pool goes on"


def test_two_who_share_the_pool_both_get_done(pool):
    results = {}

    def run(name):
        results[name] = sorted(pool.each(lambda item: item, range(100)))

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert {"a": list(range(100)), "b": list(range(100))} == results


def test_memory_is_lent_again_and_grows_to_what_is_asked_for(pool):
    """First touch costs more than all the rest: buffers are used over and over."""
    with pool.buffer(4096) as view:
        view[:4] = b"mark"
    with pool.buffer(100) as view:
        assert (100, b"mark") == (len(view), bytes(view[:4]))
        with pool.buffer(100) as other:
            assert b"\0\0\0\0" == bytes(other[:4]), "one at a time each"
    with pool.buffer(1 << 20) as view:
        assert 1 << 20 == len(view)
    pool.trim()
    with pool.buffer(4096) as view:
        assert b"\0\0\0\0" == bytes(view[:4])


def test_a_rate_of_nothing_lets_everything_through():
    Pace(0).take(1 << 60, threading.Event())


def test_waiting_for_the_rate_ends_when_it_is_told_to_stop():
    """SIGTERM does not wait for a slow rate."""
    stop = threading.Event()
    stop.set()

    with pytest.raises(StoppedError):
        Pace(1).take(1 << 40, stop)


def test_threads_share_one_rate():
    """F88: what one has taken the other waits for."""
    now = [0.0]
    pace = Pace(100, clock=lambda: now[0])
    waits = []

    class Stop:
        def wait(self, wait_s):
            waits.append(wait_s)

    for _ in range(3):
        pace.take(100, Stop())

    assert [1.0, 2.0, 3.0] == waits
