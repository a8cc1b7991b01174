"""Which sums of shards the elements of a stripe are, and how a lost shard follows from others.

``docs/reference/parity-v1.md`` is normative. A stripe has up to ``MEMBERS_MAX`` members, shards of
one checkpoint, and up to ``ELEMENTS_MAX`` elements. Shards are read as bytes of the field of 256
elements; a shorter one goes on with zeros. An element is a sum of all members, each times its
*weight*; so is a lost member of whatever else is there. Pure: numbers alone, no bytes of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MATRIX = "cauchy-255"
"""Names the weights below; elements of another name are of no use here."""
MEMBERS_MAX = 64
ELEMENTS_MAX = 16

_POLYNOMIAL = 0x11D


def _tables() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return 2^n of each n, twice over, and the n of each 2^n."""
    powers, logs, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value <<= 1
        if value > 0xFF:
            value ^= _POLYNOMIAL
    return tuple(powers), tuple(logs)


_POWERS, _LOGS = _tables()


def product(one: int, other: int) -> int:
    """Return the product of two elements of the field, 0 to 255 each."""
    return _POWERS[_LOGS[one] + _LOGS[other]] if one and other else 0


def inverse(one: int) -> int:
    """Return what ``one``, 1 to 255, gives 1 with.

    Raises:
        ZeroDivisionError: it is 0.
    """
    if not one:
        raise ZeroDivisionError("0 has no inverse")
    return _POWERS[255 - _LOGS[one]]


def weight(element: int, member: int) -> int:
    """Return the weight of a member in an element; both count from 0. Never 0."""
    return inverse((255 - element) ^ member)


@dataclass(frozen=True, slots=True)
class Term:
    """One piece of a stripe and its weight in a sum: a member, or an element, by its number."""

    number: int
    is_element: bool
    weight: int


def terms_of_element(element: int, members_count: int) -> tuple[Term, ...]:
    """Return the sum that an element is: over all members."""
    return tuple(Term(i, False, weight(element, i)) for i in range(members_count))


def terms_of_member(
    member: int, members_count: int, *, held: Iterable[int], elements: Sequence[int]
) -> tuple[Term, ...]:
    """Return the sum that a lost member is, over as many pieces as the stripe has members.

    Args:
        member: The lost one, 0 to ``members_count - 1``.
        members_count: Of the stripe.
        held: Members that are there; the lost one is not asked for, whether named or not.
        elements: Elements that are there, in the order to take them.

    Raises:
        ValueError: fewer pieces are there than it takes.
    """
    there = sorted({number for number in held if 0 <= number < members_count} - {member})
    lost = [number for number in range(members_count) if number not in there]
    taken = list(dict.fromkeys(elements))[: len(lost)]
    if len(taken) < len(lost):
        raise ValueError(
            f"{len(there)} members and {len(taken)} elements are fewer than {members_count} pieces"
        )
    # Lost members x, elements e, the others d: B x = e + A d, so that x = B' e + B' A d.
    row = _inverted([[weight(e, x) for x in lost] for e in taken])[lost.index(member)]
    found = [Term(e, True, factor) for e, factor in zip(taken, row, strict=True)]
    for number in there:
        total = 0
        for element, factor in zip(taken, row, strict=True):
            total ^= product(factor, weight(element, number))
        found.append(Term(number, False, total))
    return tuple(term for term in found if term.weight)


def _inverted(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the inverse of a square matrix; each one of weights has one."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [product(factor, value) for value in rows[column]]
        for i in range(size):
            if i != column and rows[i][column]:
                rows[i] = [
                    value ^ product(rows[i][column], of_pivot)
                    for value, of_pivot in zip(rows[i], rows[column], strict=True)
                ]
    return [row[size:] for row in rows]
