"""Fetches at a byte rate: how much at a time, and what ends the wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import StoppedError, UnavailableError
from holdfast.format.digest import PART_BYTES
from holdfast_services.kit.pace import Pace
from holdfast_services.transport import Fetch, FetchRequest
from holdfast_services.transport.paced import Paced

PARTS = 6
LENGTH = (PARTS - 1) * PART_BYTES + 7
REQUEST = FetchRequest(key="k", incarnation=1, length_bytes=LENGTH, digests=(b"",) * PARTS)
SLOW, FAST = 1 << 20, 64 * PART_BYTES


class Noted(Pace):
    """A rate that keeps nobody waiting, and notes what was asked of it."""

    def __init__(self, rate_bytes_per_s, said, wait_s=0.0):
        super().__init__(rate_bytes_per_s)
        self._said, self._wait_s = said, wait_s
        self.asked = threading.Event()

    def promise(self, length_bytes):
        self._said.append(length_bytes)
        self.asked.set()
        return self._wait_s


class Beneath:
    """A transport that gives what is asked for, until it fails."""

    def __init__(self, said, fails_at=PARTS):
        self._said, self._fails_at = said, fails_at

    def fetch(self, _, fetch):
        self._said.append(tuple(fetch.missing))
        for index in fetch.missing:
            if index >= self._fails_at:
                raise UnavailableError("gone")
            fetch.done.add(index)


def wanted(done=()):
    return Fetch(REQUEST, memoryview(b""), done=set(done))


def test_each_part_is_fetched_when_the_rate_has_let_it_through():
    said = []
    fetch = wanted(done={1})
    Paced(Beneath(said), Noted(SLOW, said)).fetch((), fetch)

    part = PART_BYTES
    assert [part, (0,), part, (2,), part, (3,), part, (4,), 7, (5,)] == said
    assert set(range(PARTS)) == fetch.done


def test_at_a_high_rate_several_parts_are_under_way_at_a_time():
    said = []
    Paced(Beneath(said), Noted(FAST, said)).fetch((), wanted())

    assert [4 * PART_BYTES, (0, 1, 2, 3), PART_BYTES + 7, (4, 5)] == said


def test_without_a_rate_all_is_one_fetch_also_once_one_is_to_be_kept_again():
    said = []
    paced = Paced(Beneath(said), Noted(0, said))
    paced.resume()
    paced.fetch((), wanted())

    assert [tuple(range(PARTS))] == said


def test_a_fetch_that_waits_goes_on_with_all_the_rest_when_the_rate_is_lifted():
    """4.8: a restore may have come to need what began as a copy."""
    said = []
    pace = Noted(SLOW, said, wait_s=3600.0)
    paced = Paced(Beneath(said), pace)
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(paced.fetch, (), wanted())
        pace.asked.wait()
        paced.lift()
        fetching.result()

    assert [PART_BYTES, tuple(range(PARTS))] == said


def test_after_it_was_lifted_the_rate_is_kept_again():
    said = []
    paced = Paced(Beneath(said), Noted(SLOW, said))
    paced.lift()
    paced.fetch((), wanted())
    paced.resume()
    paced.fetch((), wanted(done=range(1, PARTS)))

    assert [tuple(range(PARTS)), PART_BYTES, (0,)] == said


def test_a_wait_ends_with_the_fetch():
    """SIGTERM does not wait for a slow rate."""
    said = []
    pace = Noted(SLOW, said, wait_s=3600.0)
    paced, fetch = Paced(Beneath(said), pace), wanted()
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(paced.fetch, (), fetch)
        pace.asked.wait()
        fetch.stop.set()
        paced.lift()
        with pytest.raises(StoppedError):
            fetching.result()
    with pytest.raises(StoppedError):
        Paced(Beneath(said), pace).fetch((), fetch)

    assert [PART_BYTES] == said


def test_parts_that_came_stay_when_a_later_one_does_not():
    said = []
    fetch = wanted()
    with pytest.raises(UnavailableError):
        Paced(Beneath(said, fails_at=2), Noted(SLOW, said)).fetch((), fetch)

    assert {0, 1} == fetch.done


def test_the_time_for_a_portion_is_by_its_own_length():
    """A source that hangs is left as soon as one of a short fetch."""
    only = Fetch(REQUEST, memoryview(b""), done={0}, only=frozenset({0, 1, 5}))

    assert [1, 5] == only.missing
    assert PART_BYTES + 7 == only.missing_bytes
