"""Jobs of a trace, whichever format they were read from."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_services.scheduler.simulator.truth import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job that will be submitted.

    ``asked_gpus`` and ``asked_batch`` are what its user would ask a scheduler for that adapts
    nothing; None: nobody said.
    """

    name: str
    truth: Truth
    submitted_s: float
    asked_gpus: int | None = None
    asked_batch: int | None = None
