"""The traces that were published with Pollux: measured step times, noise, and workloads.

A folder has ``traces/APPLICATION/`` with ``placements.csv`` (replicas on each node as digits, step
and synchronisation time by micro-batch), ``scalability.csv`` (the same by numbers of nodes and
replicas) and ``validation-B.csv`` (noise by epoch at batch size B), and workloads of jobs.

Between what was measured is interpolated: linearly in the micro-batch for a placement that was
measured, else linearly over nodes, replicas and micro-batch. Source: docs/reference/simulate.md.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast_services.scheduler.simulator.trace import TraceJob
from holdfast_services.scheduler.simulator.truth import Placement

Array = npt.NDArray[np.float64]

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
LOCAL_MAX = {"yolov3": 8}
"""More than this were measured, but do not fit the memory of the GPUs."""
FIXED_BATCH = {"ncf": 32768}
"""It is so short that nobody tunes it: one replica, one batch."""
NODES_MAX = 16
REPLICAS_MAX = 64


class PolluxApplication:
    """An application of the published traces; see ``Truth``."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        if self.name not in EPOCHS:
            raise InvalidRequestError(f"{folder}: an application called {self.name} is not known")
        self.epochs = EPOCHS[self.name]
        self._noise = _by_batch(folder, self.epochs)
        self._batches = sorted(self._noise)
        self._placements = _by_placement(folder / "placements.csv")
        self._scalability = _numbers(folder / "scalability.csv")
        self._times: dict[tuple[Placement, int], tuple[float, float]] = {}
        self._noises: dict[tuple[int, int], GradientNoise] = {}
        self._ends = [
            min(float(rows[epoch, 0]) for rows in self._noise.values())
            for epoch in range(self.epochs)
        ]
        locals_seen = np.concatenate([rows[:, 0] for rows in self._placements.values()])
        fixed = FIXED_BATCH.get(self.name)
        self.limits = BatchLimits(
            initial=self._batches[0],
            minimum=fixed,
            maximum=fixed or self._batches[-1],
            local_min=int(locals_seen.min()),
            local_max=LOCAL_MAX.get(self.name, int(locals_seen.max())),
            accumulation=True,
        )
        self.replicas_max = 1 if fixed else min(REPLICAS_MAX, self.limits.replicas_max)

    def ends_at(self, epoch: int) -> float:
        """Return the progress at which ``epoch`` ends: the least over all batch sizes."""
        return self._ends[epoch]

    def times_s(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        """Return the measured, or interpolated, seconds of a micro-batch and of a step."""
        key = (placement, local_batch)
        if key not in self._times:
            self._times[key] = self._interpolated(placement, float(local_batch))
        return self._times[key]

    def noise(self, batch: int, epoch: int) -> GradientNoise:
        """Return the noise in ``epoch``, linear in the batch between those that were measured."""
        key = (batch, epoch)
        if key not in self._noises:
            at = min(max(bisect_left(self._batches, batch), 1), len(self._batches) - 1)
            low, high = self._batches[at - 1], self._batches[at]
            share = min(max((batch - low) / (high - low), 0.0), 1.0)
            mixed = (1 - share) * self._noise[low][epoch] + share * self._noise[high][epoch]
            self._noises[key] = GradientNoise(sqr=float(mixed[1]), var=float(mixed[2]))
        return self._noises[key]

    def _interpolated(self, placement: Placement, local_batch: float) -> tuple[float, float]:
        canonical = min(placement[at:] + placement[:at] for at in range(len(placement)))
        rows = self._placements.get(canonical)
        if rows is not None:
            step, sync = (_linear(local_batch, rows[:, 0], rows[:, at]) for at in (1, 2))
        else:
            nodes = min(len(placement), NODES_MAX)
            asked = np.array([[nodes, sum(placement), local_batch]])
            inside, nearest = self._everywhere
            found = inside(asked)[0]
            # Outside of what was measured there is no linear answer.
            step, sync = nearest(asked)[0] if np.isnan(found).any() else found
        return float(step - sync), float(step)

    @cached_property
    def _everywhere(self) -> tuple[LinearNDInterpolator, NearestNDInterpolator]:
        groups: dict[tuple[int, int, float], list[Array]] = {}
        for placement, rows in self._placements.items():
            for row in rows:
                where = (len(placement), sum(placement), float(row[0]))
                groups.setdefault(where, []).append(row[1:])
        means = [(*where, *np.mean(found, axis=0)) for where, found in sorted(groups.items())]
        points = np.concatenate((np.array(means), self._scalability))
        return (
            LinearNDInterpolator(points[:, :3], points[:, 3:]),
            NearestNDInterpolator(points[:, :3], points[:, 3:], rescale=True),
        )


def applications(folder: Path) -> Mapping[str, PolluxApplication]:
    """Return the applications of the traces in ``folder``, by name.

    Raises:
        NotFoundError: there are no traces.
        InvalidRequestError: a file does not have the columns it should have.
    """
    found = sorted((folder / "traces").glob("*/placements.csv"))
    if not found:
        raise NotFoundError(f"{folder} has no traces/APPLICATION/placements.csv of Pollux")
    return {path.parent.name: PolluxApplication(path.parent) for path in found}


def workload(path: Path, known: Mapping[str, PolluxApplication]) -> tuple[TraceJob, ...]:
    """Return the jobs of a workload, by submission.

    Raises:
        InvalidRequestError: a column is missing, or an application has no traces.
    """
    jobs = []
    columns = ("name", "time", "application", "num_replicas", "batch_size")
    for name, time_s, application, gpus, batch in _rows(path, columns):
        if application not in known:
            raise InvalidRequestError(f"{path}: {name} is a {application}, which has no traces")
        jobs.append(
            TraceJob(
                name=name, truth=known[application], submitted_s=float(time_s),
                asked_gpus=int(gpus), asked_batch=int(batch),
            )
        )  # fmt: skip
    return tuple(sorted(jobs, key=lambda job: (job.submitted_s, job.name)))


def _linear(at: float, xs: Array, ys: Array) -> float:
    """Return the value at ``at``, beyond both ends on the line through the last two."""
    high = min(max(int(np.searchsorted(xs, at)), 1), len(xs) - 1)
    low = high - 1
    share = (at - xs[low]) / (xs[high] - xs[low])
    return float((1 - share) * ys[low] + share * ys[high])


def _rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            return [[row[column] for column in columns] for row in csv.DictReader(file)]
        except KeyError as missing:
            raise InvalidRequestError(f"{path} has no column {missing}") from None


def _numbers(path: Path) -> Array:
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    return np.array(_rows(path, columns), dtype=np.float64)


def _by_placement(path: Path) -> dict[Placement, Array]:
    """Return (micro-batch, step, synchronisation) by placement, by ascending micro-batch."""
    rows: dict[Placement, list[list[float]]] = {}
    for digits, *numbers in _rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        rows.setdefault(tuple(map(int, digits)), []).append([*map(float, numbers)])
    return {placement: np.array(sorted(found)) for placement, found in rows.items()}


def _by_batch(folder: Path, epochs: int) -> dict[int, Array]:
    """Return (progress, sqr, var) by epoch, by batch size."""
    found = {}
    for path in folder.glob("validation-*.csv"):
        rows = np.array(_rows(path, ("progress", "grad_sqr", "grad_var")), dtype=np.float64)
        if len(rows) < epochs:
            raise InvalidRequestError(f"{path} has {len(rows)} epochs, not {epochs}")
        found[int(path.stem.split("-")[1])] = rows
    if len(found) < 2:
        raise NotFoundError(f"{folder} has fewer than two validation-B.csv")
    return found
