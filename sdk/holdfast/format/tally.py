"""A number for boxes of tensors, by which ranks that never talk can be seen to save all of a state.

The tally of a box is a sum over its elements, modulo a prime: boxes that make up a tensor without a
hole or an overlap have, added up, the tally of the whole tensor. A rank takes the tallies of what
it saves and subtracts those of the tensors that it answers for. Over all ranks that is 0, and other
boxes, shapes or dtypes come to 0 as often as a hash of 56 bits fits something else by chance.

An element at ``(i, j, …)`` counts ``x^i * y^j * …`` times a number of its tensor's name, dtype and
shape; ``x, y, …`` are one for each dim. So a box is a product of geometric series. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache

from holdfast.core.shard import PRIME
from holdfast.format.boxes import Box
from holdfast.format.flat_ranges import boxes_of

DIGITS_COUNT = 14
"""Hex digits of a tally."""


def tally(fqn: str, dtype: str, shape: Sequence[int], box: Box) -> int:
    """Return the tally of the region ``box`` of a tensor, in ``0..PRIME - 1``.

    >>> halves = (Box((0, 0), (1, 3)), Box((1, 0), (1, 3)))
    >>> sum(tally("w", "F32", (2, 3), half) for half in halves) % PRIME == tally(
    ...     "w", "F32", (2, 3), Box((0, 0), (2, 3))
    ... )
    True
    """
    return _hashed(fqn) * _of_region(dtype, tuple(shape), box) % PRIME


def encode(number: int) -> str:
    """Return a tally as ``DIGITS_COUNT`` hex digits.

    >>> encode(-1)
    'fffffffffffffa'
    """
    return f"{number % PRIME:0{DIGITS_COUNT}x}"


@lru_cache(maxsize=65536)
def _of_region(dtype: str, shape: tuple[int, ...], region: Box) -> int:
    """Return the tally but for the name: the same for all tensors that are cut alike."""
    return sum(_of_box(dtype, shape, box) for box in boxes_of(shape, region)) % PRIME


def _of_box(dtype: str, shape: tuple[int, ...], box: Box) -> int:
    product = _hashed(f"{dtype} {shape}")
    for dim, (begin, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        base, inverse = _base(dim)
        series = (pow(base, length, PRIME) - 1) * inverse
        product = product * pow(base, begin, PRIME) * series % PRIME
    return product


@cache
def _base(dim: int) -> tuple[int, int]:
    """Return the base of a dim, and what a geometric series of it is divided by, inverted."""
    base = 2 + _hashed(f"dim {dim}") % (PRIME - 2)
    return base, pow(base - 1, -1, PRIME)


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % PRIME
