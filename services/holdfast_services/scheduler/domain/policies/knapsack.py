"""The best choice of one size for each job within a capacity, exactly.

Dynamic programming over the capacity: the jobs one after the other, each with its sizes. Exact also
where values are not concave in the size, as when two nodes are slower than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def choose(values: Array, sizes: Ints, capacity: int) -> list[int]:
    """Return the column that each row takes, -1 for none, so that the sum of values is greatest.

    Args:
        values: Shape ``(jobs, shapes)``; what is not above 0 is not taken.
        sizes: Shape ``(shapes,)``, at least 1.
        capacity: The most that the sizes of all rows may add up to.

    >>> choose(np.array([[3.0, 5.0], [4.0, 0.0]]), np.array([1, 2]), 2)
    [0, 0]
    """
    best, taken = _fill(values, sizes, capacity)
    return _trace(taken, sizes, int(np.argmax(best)))


def choose_within_quotas(
    values: Array,
    sizes: Ints,
    capacity: int,
    groups: Sequence[Sequence[int]],
    quotas: Sequence[int],
) -> list[int]:
    """Return as ``choose`` does, where each group of rows also has a capacity of its own.

    Args:
        values: As of ``choose``.
        sizes: As of ``choose``.
        capacity: As of ``choose``.
        groups: Rows by group; each row is in one.
        quotas: The most that the sizes of the rows of each group may add up to.
    """
    best = np.zeros(capacity + 1)
    filled = []
    for rows, quota in zip(groups, quotas, strict=True):
        within = min(quota, capacity)
        alone, taken = _fill(values[list(rows)], sizes, within)
        merged, share = best.copy(), np.zeros(capacity + 1, dtype=np.int64)
        for part in range(1, within + 1):
            candidate = best[: capacity + 1 - part] + alone[part]
            better = candidate > merged[part:]
            merged[part:][better] = candidate[better]
            share[part:][better] = part
        filled.append((rows, taken, share))
        best = merged
    chosen = [-1] * len(values)
    left = int(np.argmax(best))
    for rows, taken, share in reversed(filled):
        part = int(share[left])
        for row, column in zip(rows, _trace(taken, sizes, part), strict=True):
            chosen[row] = column
        left -= part
    return chosen


def _fill(values: Array, sizes: Ints, capacity: int) -> tuple[Array, npt.NDArray[np.int16]]:
    """Return the best value within each capacity, and the column that gave it by row."""
    best = np.zeros(capacity + 1)
    taken = np.full((len(values), capacity + 1), -1, dtype=np.int16)
    for row, of_row in enumerate(values):
        before, took = best, taken[row]
        best = before.copy()
        for column in np.flatnonzero((of_row > 0) & (sizes <= capacity)):
            size = int(sizes[column])
            candidate = before[: capacity + 1 - size] + of_row[column]
            better = candidate > best[size:]
            np.copyto(best[size:], candidate, where=better)
            np.copyto(took[size:], np.int16(column), where=better)
    return best, taken


def _trace(taken: npt.NDArray[np.int16], sizes: Ints, left: int) -> list[int]:
    """Return what each row took when ``left`` was used in all."""
    chosen = [-1] * len(taken)
    for row in range(len(taken) - 1, -1, -1):
        column = int(taken[row, left])
        chosen[row] = column
        if column >= 0:
            left -= int(sizes[column])
    return chosen
