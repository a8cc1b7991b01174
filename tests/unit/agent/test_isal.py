"""Sums of weighted bytes by ISA-L, against the field's own arithmetic."""

import random

import pytest

from holdfast.errors import PreconditionError
from holdfast.format import parity
from holdfast_services.agent import isal


@pytest.fixture
def no_library():
    isal._library.cache_clear()
    yield
    isal._library.cache_clear()


@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 63, 64, 65, 127, 1000, 4096 + 5])
@pytest.mark.parametrize("lengths", [(0,), (0, 0), (0, -1), (-5, 3, -70), (-500,)])
def test_a_sum_of_any_lengths_is_the_fields(length, lengths):
    rng = random.Random(length)
    data = [bytearray(rng.randbytes(max(length + more, 0))) for more in lengths]
    weights = [rng.randrange(256) for _ in data]
    given = [bytes(one) for one in data]
    target = bytearray(rng.randbytes(length))

    pieces = [(w, memoryview(one)) for w, one in zip(weights, data, strict=True)]
    isal.write_sum(memoryview(target), pieces)

    expected = bytearray(length)
    for weight, one in zip(weights, given, strict=True):
        for at, byte in enumerate(one[:length]):
            expected[at] ^= parity.product(weight, byte)
    assert target == expected
    assert [bytes(one) for one in data] == given


def test_long_pieces_are_added_call_by_call(monkeypatch):
    monkeypatch.setattr(isal, "BYTES_PER_CALL_MAX", 100)
    target, piece = bytearray(250), bytearray(range(250))
    isal.write_sum(memoryview(target), [(1, memoryview(piece))])
    assert target == piece


def test_a_sum_of_nothing_is_zeros():
    target = bytearray(b"what was there")
    isal.write_sum(memoryview(target), [])
    assert target == bytes(14)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch, no_library):
    monkeypatch.setattr(isal.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(isal.ctypes.util, "find_library", lambda _: None)
    with pytest.raises(PreconditionError, match=r"pip install 'holdfast\[services\]'"):
        isal.check()


def test_a_library_without_the_functions_is_named(monkeypatch, no_library):
    monkeypatch.setattr(isal, "_path", lambda: isal.ctypes.util.find_library("c"))
    with pytest.raises(PreconditionError, match="ec_init_tables"):
        isal.check()
