"""Which batch an update has: the script's, or the one that makes the most goodput.

Pure, but for NumPy below it. Who chooses tells the others; see ``group.agreed``.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.hints import StepPoint
from holdfast.elastic.updates import Batching
from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import Batch, BatchLimits, Goodput
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured, fit

SPEEDUP_MIN = 1.05
"""A batch is changed for so much more goodput: what is predicted is not what comes."""


def limits_of(
    initial: int, most: int, bounds: tuple[int, int] | None, *, accumulation: bool
) -> BatchLimits:
    """Return the limits that a script has set.

    Raises:
        InvalidRequestError: no batch keeps them all.
    """
    low, high = bounds or (1, most)
    return BatchLimits(
        initial=initial,
        maximum=most,
        local_min=low,
        local_max=min(high, most),
        accumulation=accumulation,
    )


def first(limits: BatchLimits, replicas: int, size: int | None = None) -> Batching:
    """Return the batch of a job that cannot choose yet: ``size``, or the least that is allowed.

    Without accumulation it may be smaller: the most that the ranks hold.

    Raises:
        InvalidRequestError: there are too many ranks for the largest batch.
    """
    if replicas > limits.replicas_max:
        raise InvalidRequestError(
            f"{replicas} ranks with at least {limits.local_min} samples each are more than "
            f"max_batch_size={limits.maximum}: run on {limits.replicas_max} ranks at most, or "
            f"allow smaller micro-batches"
        )
    size = max(size or limits.least, limits.local_min * replicas)
    each = -(-size // replicas)
    parts = -(-each // limits.largest_local)
    if not limits.accumulation:
        return Batching(size=min(size, replicas * limits.largest_local), replicas=replicas)
    if replicas == 1 and size > limits.initial:
        parts = max(2, parts)  # one micro-batch alone does not tell noise from signal
    return Batching(size=size, replicas=replicas, micro_batches=min(parts, size // replicas))


def chosen(
    limits: BatchLimits,
    points: Sequence[StepPoint],
    noise: tuple[float, float] | None,
    nodes: int,
    present: Batching,
) -> Batching:
    """Return the batch that makes the most goodput, or the present one if that is nearly as good.

    Args:
        limits: Which batches are allowed.
        points: What was measured.
        noise: ``sqr`` and ``var``; None: not known.
        nodes: On how many nodes the ranks are.
        present: What updates have now; how many ranks there are.
    """
    measured = [
        Measured(
            nodes=point.nodes,
            replicas=point.replicas,
            local_batch=point.local_batch,
            compute_s=point.compute_s,
            step_s=point.step_s,
        )
        for point in points
    ]
    if noise is None or not any(point.is_believable() for point in measured):
        return present
    model = Goodput(
        step_time=fit(measured),
        noise=GradientNoise(sqr=noise[0], var=noise[1]),
        limits=limits,
    )
    best, batch = model.best(nodes, present.replicas)
    now = model.at(
        nodes, present.replicas, Batch(local=present.local, accumulation=present.micro_batches - 1)
    )
    if best <= SPEEDUP_MIN * now:
        return present
    return Batching(
        size=batch.size(present.replicas),
        replicas=present.replicas,
        micro_batches=batch.accumulation + 1,
    )
