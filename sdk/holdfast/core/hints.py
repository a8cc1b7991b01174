"""What a job says of how it scales: the batches it allows, its noise, how long its steps took.

Rank 0 of a job says it with its report; the scheduler predicts from it what more GPUs are worth.
Numbers that cannot be are refused by name, and only they: ``refused`` says which, and the report
they came with stands.

Units: samples, seconds; noise as ``holdfast.elastic`` defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

POINTS_COUNT_MAX = 64
"""Configurations of one job; a rank keeps those that were used last."""
COUNT_MAX = 1 << 40
"""Of samples, replicas and steps."""
SECONDS_MIN, SECONDS_MAX = 1e-7, 1e5
"""Of one step: a day is a lie, or no step."""
NOISE_MAX = 1e30
REFUSED_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """What the steps of one configuration took: medians of ``count`` steps.

    ``compute_s`` is a micro-batch of ``local_batch`` samples without the network, ``step_s`` one
    whose gradients are averaged over ``replicas`` ranks on ``nodes`` nodes.
    """

    nodes: int
    replicas: int
    local_batch: int
    compute_s: float
    step_s: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHints:
    """What rank 0 of a job knows.

    ``initial_batch`` is what its learning rate was chosen for, ``batch`` what an update has now.
    ``batch_max``, ``local_min``, ``local_max`` and ``accumulates`` bound what it may have; 0: no
    bound. ``sqr`` and ``var`` are 0 as long as nothing is known; ``biased``: by differences between
    updates. ``progress`` counts updates at the initial batch size. ``refused``: why the rest is
    not what was said.
    """

    initial_batch: int = 0
    batch: int = 0
    batch_max: int = 0
    local_min: int = 0
    local_max: int = 0
    accumulates: bool = False
    sqr: float = 0.0
    var: float = 0.0
    biased: bool = False
    progress: float = 0.0
    points: tuple[StepPoint, ...] = ()
    refused: str = ""


def check(hints: JobHints) -> None:
    """Refuse what no job can have.

    Raises:
        InvalidRequestError: names the field, and of a point the configuration.
    """
    for name in ("initial_batch", "batch", "batch_max", "local_min", "local_max"):
        _check_count(name, getattr(hints, name))
    for name, most in (("sqr", NOISE_MAX), ("var", NOISE_MAX), ("progress", float(COUNT_MAX))):
        _check_number(name, getattr(hints, name), 0.0, most)
    if hints.batch_max and hints.initial_batch > hints.batch_max:
        raise InvalidRequestError(
            f"hints: initial_batch {hints.initial_batch} is more than batch_max {hints.batch_max}"
        )
    if hints.local_max and hints.local_min > hints.local_max:
        raise InvalidRequestError(
            f"hints: local_min {hints.local_min} is more than local_max {hints.local_max}"
        )
    if len(hints.points) > POINTS_COUNT_MAX:
        raise InvalidRequestError(
            f"hints: {len(hints.points)} measured points, at most {POINTS_COUNT_MAX}"
        )
    for point in hints.points:
        _check_point(point)


def checked(hints: JobHints) -> JobHints:
    """Return a peer's hints, or in their place the reason why they are refused."""
    try:
        check(hints)
    except InvalidRequestError as error:
        return JobHints(refused=error.message[:REFUSED_LENGTH_MAX])
    if len(hints.refused) > REFUSED_LENGTH_MAX or holds_nul(hints.refused):
        return JobHints(refused="hints: a reason that is no text of ours")
    return hints


def _check_point(point: StepPoint) -> None:
    where = f" of {point.nodes} nodes, {point.replicas} replicas, {point.local_batch} samples"
    for name in ("nodes", "replicas", "local_batch", "count"):
        _check_count(name, getattr(point, name), where, least=1)
    if point.nodes > point.replicas:
        raise InvalidRequestError(f"hints: more nodes than replicas{where}")
    for name in ("compute_s", "step_s"):
        _check_number(name, getattr(point, name), SECONDS_MIN, SECONDS_MAX, where)


def _check_count(name: str, value: int, where: str = "", *, least: int = 0) -> None:
    if not least <= value <= COUNT_MAX:
        raise InvalidRequestError(
            f"hints: {name}{where} is {value}, not within {least} and {COUNT_MAX}"
        )


def _check_number(name: str, value: float, least: float, most: float, where: str = "") -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidRequestError(
            f"hints: {name}{where} is {value!r}, not within {least:g} and {most:g}"
        )
