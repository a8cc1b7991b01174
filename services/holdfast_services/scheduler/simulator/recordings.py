"""Recordings of our own: what a cluster ran, as JSON lines.

The first line names the format, each other line is a job with what is true of it: seven parameters
of its step time, and the noise of its gradients by samples done. The scheduler's catalogue has all
of it. Nothing in a file is believed unchecked. Source: docs/reference/simulate.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointError, InvalidRequestError, NotFoundError
from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.step_time import StepTime
from holdfast_services.scheduler.domain.policies.facts import REPLICAS_MAX, WORK_MAX
from holdfast_services.scheduler.simulator.trace import TraceJob
from holdfast_services.scheduler.simulator.truth import Placement

FORMAT = "holdfast.recording/1"
JOBS_MAX = 100_000
LINE_BYTES_MAX = 1 << 20


class RecordedJob:
    """A job of a recording; see ``Truth``. An epoch is a span in which noise stays the same."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.name = str(fields["family"])
        self.limits = BatchLimits(**fields["batch"])
        self.replicas_max = int(fields["gpus_max"])
        self._model = StepTime(**fields["step_time"])
        spans = [(float(at), float(sqr), float(var)) for at, sqr, var in fields["noise"]]
        samples = float(fields["samples"])
        ends = [*(at for at, _, _ in spans[1:]), samples]
        begins = [at for at, _, _ in spans]
        ordered = begins[0] == 0 and all(low < high for low, high in zip(begins, ends, strict=True))
        if not (ordered and samples <= WORK_MAX):
            raise InvalidRequestError("noise begins at 0 and grows up to samples")
        if not 1 <= self.replicas_max <= REPLICAS_MAX:
            raise InvalidRequestError(f"gpus_max is {self.replicas_max}, not 1 to {REPLICAS_MAX}")
        self._noise = [GradientNoise(sqr=sqr, var=var) for _, sqr, var in spans]
        self._ends = [end / self.limits.initial for end in ends]
        self.epochs = len(ends)

    def ends_at(self, epoch: int) -> float:
        """Return the steps at the initial batch size at which the noise changes."""
        return self._ends[epoch]

    def times_s(self, placement: Placement, local_batch: int) -> tuple[float, float]:
        """Return what the recorded model says."""
        model = self._model
        step_s = model.step_s(len(placement), sum(placement), local_batch)
        return model.compute_s(local_batch), step_s

    def noise(self, batch: int, epoch: int) -> GradientNoise:
        """Return the recorded noise; it does not depend on the batch."""
        del batch
        return self._noise[epoch]


def recording(path: Path) -> tuple[TraceJob, ...]:
    """Return the jobs of a recording, by submission.

    Raises:
        NotFoundError: there is no such file.
        InvalidRequestError: a line is not as it should be; names it.
    """
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist")
    with path.open(encoding="utf-8") as file:
        lines = file.readlines(LINE_BYTES_MAX * 64)
    if not lines or _parsed(path, 1, lines[0]).get("format") != FORMAT:
        raise InvalidRequestError(f'{path} does not begin with {{"format": "{FORMAT}"}}')
    if len(lines) > JOBS_MAX + 1:
        raise InvalidRequestError(f"{path} has {len(lines) - 1} jobs, more than {JOBS_MAX}")
    jobs = [_job(path, at, line) for at, line in enumerate(lines[1:], start=2) if line.strip()]
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if twice:
        raise InvalidRequestError(f"{path} has two jobs called {twice[0]}")
    return tuple(sorted(jobs, key=lambda job: (job.submitted_s, job.name)))


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _job(path: Path, at: int, line: str) -> TraceJob:
    fields = _parsed(path, at, line)
    try:
        submitted_s = float(fields["submitted_s"])
        if not (math.isfinite(submitted_s) and submitted_s >= 0):
            raise InvalidRequestError(f"submitted_s is {submitted_s}")
        return TraceJob(
            name=str(fields["name"]),
            truth=RecordedJob(fields),
            submitted_s=submitted_s,
            asked_gpus=fields.get("asked_gpus"),
            asked_batch=fields.get("asked_batch"),
        )
    except KeyError as missing:
        raise InvalidRequestError(f"{path}, line {at}: {missing} is missing") from None
    except (TypeError, ValueError, CheckpointError) as error:
        raise InvalidRequestError(f"{path}, line {at}: {error}") from error


def _parsed(path: Path, at: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"{path}, line {at} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"{path}, line {at} is no JSON object")
    return fields
