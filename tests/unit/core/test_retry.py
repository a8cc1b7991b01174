"""``core.retry`` and ``rpc.channel.retrying`` (F57)."""

import pytest

from holdfast.core.retry import Backoff
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.rpc.channel import retrying

THREE = Backoff(first_s=1.0, factor=3.0, wait_s_max=2.0, tries_max=3)


def test_waits_grow_to_their_bound_and_end():
    assert [1.0, 2.0] == list(THREE.waits())
    assert [] == list(Backoff(tries_max=1).waits())


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
