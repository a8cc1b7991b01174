"""The choice of a shape for each job that is worth the most within what there is of each pool.

Of one pool it is a knapsack, solved exactly; of several, an integer program (HiGHS), to within a
millionth, or a thousandth of large ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast_services.scheduler.domain.policies.knapsack import choose, choose_within_quotas
from holdfast_services.scheduler.domain.policies.shapes import Pool
from holdfast_services.scheduler.domain.policies.table import Array, Ints, Table

GAP, GAP_OF_MANY, MANY = 1e-6, 1e-3, 5_000
SEARCH_NODES_MAX = 200
"""A bound on the search that is the same on every machine, as one by the clock is not."""


def rounded(
    table: Table, values: Array, capacity: Mapping[Pool, int], quota_left: Mapping[str, int]
) -> list[int]:
    """Return the column of each row, -1 for none, so that the sum of values is greatest.

    Args:
        table: The jobs and the shapes.
        values: By job and shape; what is not above 0 is not taken.
        capacity: GPUs by pool.
        quota_left: GPUs by owner, for those who have a quota.
    """
    owners = [job.owner for job in table.jobs]
    bound = {owner: gpus for owner, gpus in quota_left.items() if owner in owners}
    if len(capacity) > 1:
        return rounded_by_program(table, values, capacity, quota_left)
    whole = sum(capacity.values())
    if not bound:
        return choose(values, table.gpus, whole)
    groups = [[row for row, owner in enumerate(owners) if owner == one] for one in sorted(bound)]
    rest = [row for row, owner in enumerate(owners) if owner not in bound]
    quotas = [bound[one] for one in sorted(bound)]
    return choose_within_quotas(values, table.gpus, whole, [*groups, rest], [*quotas, whole])


def rounded_by_program(
    table: Table, values: Array, capacity: Mapping[Pool, int], quota_left: Mapping[str, int]
) -> list[int]:
    """Return as ``rounded`` does, by the integer program for one pool as well."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - slow to import
    from scipy.sparse import csr_matrix  # noqa: PLC0415

    rows, columns = np.nonzero(values > 0)
    chosen = [-1] * len(values)
    if not len(rows):
        return chosen
    gpus = table.gpus[columns].astype(np.float64)
    pools = sorted(capacity)
    kind = np.array([pools.index(shape.pool) for shape in table.shapes])[columns]
    owners = sorted({job.owner for job in table.jobs} & quota_left.keys())
    owner = np.array([owners.index(j.owner) if j.owner in owners else -1 for j in table.jobs])[rows]
    jobs = len(values)
    quoted = np.flatnonzero(owner >= 0)
    at = np.arange(len(rows))
    matrix = csr_matrix(
        (
            np.concatenate((np.ones(len(rows)), gpus, gpus[quoted])),
            (
                np.concatenate((rows, jobs + kind, jobs + len(pools) + owner[quoted])),
                np.concatenate((at, at, at[quoted])),
            ),
        ),
        shape=(jobs + len(pools) + len(owners), len(rows)),
    )
    most: Sequence[float] = [
        *[1.0] * jobs, *(capacity[pool] for pool in pools), *(quota_left[one] for one in owners),
    ]  # fmt: skip
    gap = GAP if len(rows) < MANY else GAP_OF_MANY
    found = milp(
        -values[rows, columns],
        constraints=LinearConstraint(matrix, -np.inf, np.array(most)),
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": gap, "node_limit": SEARCH_NODES_MAX},
    )
    if found.x is None:  # nothing found within the bound: the first that fit, by value per GPU
        return _greedy(values, rows, columns, gpus, matrix, np.array(most))
    for one in np.flatnonzero(found.x > 0.5):
        chosen[rows[one]] = int(columns[one])
    return chosen


def _greedy(
    values: Array, rows: Ints, columns: Ints, gpus: Array, matrix: Any, most: Array
) -> list[int]:
    chosen = [-1] * len(values)
    left = most.copy()
    dense = matrix.tocsc()
    for one in np.argsort(-values[rows, columns] / gpus, kind="stable"):
        begin, end = dense.indptr[one], dense.indptr[one + 1]
        limits, needs = dense.indices[begin:end], dense.data[begin:end]
        if (left[limits] >= needs).all():
            left[limits] -= needs
            chosen[int(rows[one])] = int(columns[one])
    return chosen
