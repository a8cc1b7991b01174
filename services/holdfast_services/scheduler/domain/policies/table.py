"""Goodput of every job in every shape that it may have, in one batch of NumPy.

What nobody has measured comes from the fit of the job, or of its family; where it was measured the
fit is corrected. A job that nothing is known of may have the least that it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.goodput.batches import best_of_pairs
from holdfast.goodput.curves import Curve
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.profile import Profile
from holdfast_services.scheduler.domain.policies.facts import Family, Job, Node, View
from holdfast_services.scheduler.domain.policies.shapes import Shape, shape_of, shapes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

GROWTH = 2
"""A job grows to at most so many times what it, or its family, has been measured on (F100)."""
LEFT_MIN = 0.05
"""Of what was declared so much is always taken to be left: declarations are wrong."""
NO_NOISE = GradientNoise(sqr=1.0, var=0.0)
"""Before it was measured larger batches are taken to bring nothing."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a job's speed: profiles by type of GPU, noise, the most GPUs measured."""

    profiles: Mapping[str, Profile]
    noise: GradientNoise
    replicas_max: int


@dataclass(frozen=True, slots=True)
class Table:
    """Jobs by rows, shapes by columns.

    ``goodput``: samples of the initial batch size per second, 0 where the job may not have the
    shape, 1 per GPU where nothing is known. ``current``: the column of the shape that it has now,
    -1 if none. ``move_s``: what it costs to get there; 0 where it is. ``known``: there is a
    profile. ``left``: samples, NaN if nobody said. ``knowledge``: what goodput was made from.
    """

    jobs: tuple[Job, ...]
    shapes: tuple[Shape, ...]
    gpus: Ints
    goodput: Array
    current: Ints
    move_s: Array
    known: Flags
    left: Array
    knowledge: tuple[Known, ...]

    def goodput_at(self, nodes: int, gpus: int) -> Array:
        """Return the goodput of each job on so many GPUs of any type, whatever its bounds."""
        found = np.full(len(self.jobs), float(gpus))
        rows = np.flatnonzero(self.known)
        if len(rows):
            knowledge = [self.knowledge[row] for row in rows]
            limits = [self.jobs[row].batches.as_array() for row in rows]
            where = np.full(len(rows), 1.0)
            best = best_of_pairs(
                np.stack([_models(one.profiles, [""])[0] for one in knowledge], axis=1),
                np.array([one.noise.ratio for one in knowledge]),
                np.stack(limits, axis=1), nodes * where, gpus * where, {},
            )  # fmt: skip
            found[rows] = best.goodput
        return found


def table(view: View, jobs: Sequence[Job]) -> Table:
    """Return the table of ``jobs``, some of those of ``view``, in their order."""
    columns = shapes(view.nodes, jobs)
    nodes = {node.name: node for node in view.nodes}
    column_of = {shape: at for at, shape in enumerate(columns)}
    current = np.array(
        [column_of.get(shape, -1) if (shape := shape_of(job, nodes)) else -1 for job in jobs],
        dtype=np.int64,
    )
    families = [view.families.get(job.family) for job in jobs]
    known = [_known(job, family) for job, family in zip(jobs, families, strict=True)]
    pairs = zip(jobs, families, strict=True)
    return Table(
        jobs=tuple(jobs),
        shapes=columns,
        gpus=np.array([shape.gpus for shape in columns], dtype=np.int64),
        goodput=_goodput(jobs, known, columns),
        current=current,
        move_s=_move_s(jobs, columns, current, nodes),
        known=np.array([bool(one.profiles) for one in known], dtype=np.bool_),
        left=np.array([_left(job, family) for job, family in pairs], dtype=np.float64),
        knowledge=tuple(known),
    )


def _known(job: Job, family: Family | None) -> Known:
    """Return the family's profile where it has one: it has the points of the job as well."""
    profiles = {**job.profiles, **family.profiles} if family else job.profiles
    noise = job.noise or (family.noise if family else None) or NO_NOISE
    seen = max((profile.replicas_max for profile in profiles.values()), default=0)
    return Known(profiles, noise, seen)


def _left(job: Job, family: Family | None) -> float:
    """Return the samples that are left, as declared, else as jobs of the family took."""
    whole = job.work.declared
    if whole is None and family is not None:
        whole = family.work
    if whole is None:
        return float("nan")
    return max(whole - job.work.done, LEFT_MIN * whole, 1.0)


def _goodput(jobs: Sequence[Job], known: Sequence[Known], columns: Sequence[Shape]) -> Array:
    """Return samples per second, by job and shape."""
    gpus = np.array([shape.gpus for shape in columns], dtype=np.float64)
    nodes = np.array([shape.nodes for shape in columns], dtype=np.float64)
    kinds = sorted({shape.pool.gpu_type for shape in columns})
    of_kind = np.array([kinds.index(shape.pool.gpu_type) for shape in columns], dtype=np.int64)
    allowed = _allowed(jobs, known, gpus, [kinds[at] for at in of_kind])
    has_profile = np.array([bool(one.profiles) for one in known], dtype=np.bool_)
    rows, places = np.nonzero(allowed & has_profile[:, None])
    goodput = np.where(allowed, gpus, 0.0)
    if not len(rows):
        return goodput
    models = np.stack([_models(one.profiles, kinds) for one in known], axis=2)
    limits = np.stack([job.batches.as_array() for job in jobs], axis=1)
    ratios = np.array([one.noise.ratio for one in known])
    best = best_of_pairs(
        models[of_kind[places], :, rows].T, ratios[rows], limits[:, rows],
        nodes[places], gpus[places], _curves(known, columns, rows, places),
    )  # fmt: skip
    goodput[rows, places] = best.goodput
    return goodput


def _models(profiles: Mapping[str, Profile], kinds: Sequence[str]) -> Array:
    """Return the parameters on each type of GPU; on one that was not measured, of the first."""
    if not profiles:
        return np.ones((len(kinds), 7))
    any_kind = min(profiles)
    return np.stack(
        [profiles[kind if kind in profiles else any_kind].step_time.as_array() for kind in kinds]
    )


def _curves(
    known: Sequence[Known], columns: Sequence[Shape], rows: Ints, places: Ints
) -> dict[int, Curve]:
    """Return how far models are off, by the pair of a row and a place, where that was measured."""
    where = [(shape.pool.gpu_type, (shape.nodes, shape.gpus)) for shape in columns]
    found = {}
    for pair, (row, place) in enumerate(zip(rows, places, strict=True)):
        kind, key = where[place]
        profile = known[row].profiles.get(kind)
        if profile is not None and key in profile.curves:
            found[pair] = profile.curves[key]
    return found


def _allowed(
    jobs: Sequence[Job], known: Sequence[Known], gpus: Array, kinds: Sequence[str]
) -> Flags:
    """Return which shapes are within the bounds of each job and of what was measured."""
    least = np.array([job.replicas_min for job in jobs])
    most = np.array([min(job.replicas_max, job.batches.replicas_max) for job in jobs])
    grown = np.array([GROWTH * one.replicas_max for one in known])
    most = np.minimum(most, np.maximum(grown, np.maximum(least, 1)))
    allowed: Flags = (gpus >= least[:, None]) & (gpus <= most[:, None])
    types = np.array(kinds)
    for row, job in enumerate(jobs):
        if job.meshes:
            most_known = known[row].replicas_max
            for kind in set(kinds):
                of_kind = types == kind
                within = allowed[row, of_kind]
                allowed[row, of_kind] = _with_mesh(job, gpus[of_kind], within, most_known)
        if job.gpu_types is not None:
            allowed[row] &= np.isin(types, list(job.gpu_types))
    return allowed


def _with_mesh(job: Job, gpus: Array, allowed: Flags, measured: int) -> Flags:
    """Return which numbers of GPUs have a mesh; the next above those measured may be far away.

    All are of one type of GPU: the next number that there is of another one may be another.
    """
    fits: Flags = np.array([job.has_mesh_for(int(count)) for count in gpus], dtype=np.bool_)
    most = min(job.replicas_max, job.batches.replicas_max)
    above = gpus[fits & (gpus > max(measured, job.replicas_min - 1)) & (gpus <= most)]
    known = measured > 0 and len(above) > 0
    following = gpus == above.min() if known else np.zeros_like(fits)
    return fits & (allowed | following)


def _move_s(
    jobs: Sequence[Job], columns: Sequence[Shape], current: Ints, nodes: Mapping[str, Node]
) -> Array:
    """Return the cost of each move; less where the nodes that hold the checkpoint are enough."""
    near = np.array([len(job.held_by & nodes.keys()) for job in jobs])
    local_s = np.array([job.cost.seconds(local=True) for job in jobs])
    far_s = np.array([job.cost.seconds(local=False) for job in jobs])
    wide = np.array([shape.nodes for shape in columns])
    move_s = np.where(wide <= near[:, None], local_s[:, None], far_s[:, None])
    stays = np.flatnonzero(current >= 0)
    move_s[stays, current[stays]] = 0.0
    return move_s
