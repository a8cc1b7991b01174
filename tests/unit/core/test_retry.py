"""``core.retry`` and ``rpc.channel.retrying`` (F57)."""

from dataclasses import replace
from itertools import islice

import pytest

from holdfast.core.retry import Waits, worth_telling
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.rpc.channel import retrying

THREE = Waits(first_s=1.0, factor=3.0, wait_s_max=2.0, tries_max=3)


ENDLESS = Waits(first_s=0.5, wait_s_max=60.0)


def test_waits_grow_to_their_bound_and_end():
    assert [1.0, 2.0] == list(THREE)
    assert [] == list(replace(THREE, tries_max=1))


def test_waits_without_a_number_of_tries_double_to_their_bound_for_ever():
    waits = list(islice(ENDLESS, 2000))

    assert [0.5, 1.0, 2.0] == waits[:3]
    assert {60.0} == set(waits[7:])


def test_a_wait_is_known_by_the_tries_that_have_failed():
    """Also before any, and after more than a float can double."""
    assert [0.5, 0.5, 1.0, 60.0] == [ENDLESS.wait_s(tries) for tries in (0, 1, 2, 10**9)]


def test_people_hear_ever_less_of_what_fails_in_a_row():
    assert [1, 2, 4, 8, 16] == [n for n in range(20) if worth_telling(n)]


def test_a_retryable_error_is_tried_again_until_it_works():
    failures = [UnavailableError("down"), UnavailableError("down")]
    waits = []

    def attempt():
        if failures:
            raise failures.pop()
        return "done"

    assert "done" == retrying(attempt, THREE, waits.append)
    assert [1.0, 2.0] == waits


def test_the_last_error_is_raised():
    tries = []

    def attempt():
        tries.append(len(tries))
        raise UnavailableError(f"try {len(tries)}")

    with pytest.raises(UnavailableError, match="try 3"):
        retrying(attempt, THREE, lambda _: None)


def test_an_error_that_is_not_retryable_is_raised_at_once():
    waits = []

    def attempt():
        raise NotFoundError("gone")

    with pytest.raises(NotFoundError):
        retrying(attempt, THREE, waits.append)
    assert [] == waits
