"""Which kind of trace a path is, and its jobs."""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast_services.scheduler.simulator.pollux_traces import applications, workload
from holdfast_services.scheduler.simulator.recordings import recording
from holdfast_services.scheduler.simulator.trace import TraceJob


def read_trace(
    path: Path, traces: Path | None = None, *, keep: float = 1.0, seed: int = 0
) -> tuple[TraceJob, ...]:
    """Return the jobs of a workload of Pollux (``.csv``), or of a recording of our own.

    Args:
        path: The file.
        traces: The folder that has the folder ``traces``; by default the one that the workload's
            folder lies in.
        keep: So large a part of the jobs is kept, drawn by ``seed``: a lower load.
        seed: See ``keep``.

    Raises:
        NotFoundError: there is no such file, or no traces with it.
        InvalidRequestError: it is not as its format says, or nothing is kept.
    """
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist")
    if path.suffix == ".csv":
        jobs = workload(path, applications(traces or path.resolve().parent.parent))
    else:
        jobs = recording(path)
    if keep < 1:
        drawn = random.Random(f"{seed}:keep")  # noqa: S311 - no secret
        jobs = tuple(job for job in jobs if drawn.random() < keep)
    if not jobs:
        raise InvalidRequestError(f"{path} has no jobs")
    return jobs
