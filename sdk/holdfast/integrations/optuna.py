"""Optuna over the scheduler: each trial is a job that is moved, resumed and pruned."""

from __future__ import annotations

import hashlib
import math
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna

from holdfast.core.job_spec import JobSpec, check
from holdfast.core.records import to_record
from holdfast.errors import NotFoundError, PreconditionError, UnavailableError
from holdfast.rpc import rest

POLL_S = 1.0
OUT_S_MAX = 600.0
"""How long a service may not answer before its trials fail; their jobs go on."""
NOTES_LOOKED_AT = 10

Command = Callable[[optuna.Trial], Sequence[str]]


class JobObjective:
    """An objective for ``study.optimize``: submits a job for each trial and waits for its end.

    A job is named by its command, so a trial with the same parameters is the same job: one that
    was cut off, with its tuner or without, goes on from its newest checkpoint. A tuner that ends
    leaves its jobs running.

    Args:
        like: What all jobs have alike; ``name`` is the first part of their names.
        command: Suggests the parameters of a trial, and returns its command: what
            ``holdfast submit`` gets behind ``--``.
        metric: The key of the number to optimize, in the notes of the job's steps.
        scheduler: URL of the scheduler, such as ``http://10.0.0.2:7390``.
        metadata: URL of the metadata service's REST, such as ``http://10.0.0.2:7380``.
    """

    def __init__(
        self,
        like: JobSpec,
        command: Command,
        *,
        metric: str,
        scheduler: str,
        metadata: str,
    ) -> None:
        self._like = like
        self._command = command
        self._metric = metric
        self._scheduler = f"{scheduler.rstrip('/')}/api/v1/jobs"
        self._metadata = f"{metadata.rstrip('/')}/api/v1/jobs"

    def __call__(self, trial: optuna.Trial) -> float:
        """Return the newest value that the job of a trial has noted, once it has ended.

        Raises:
            optuna.TrialPruned: the pruner, or a user, has ended the job early.
            InvalidRequestError, ExhaustedError, AlreadyExistsError: it was not taken on.
            PreconditionError: it failed, or has noted no value.
            UnavailableError: a service has not answered for ``OUT_S_MAX``.
        """
        command = tuple(self._command(trial))
        spec = replace(self._like, name=job_of(self._like.name, command), command=command)
        check(spec)
        rest.ask("POST", self._scheduler, to_record(spec))
        path, reported = urllib.parse.quote(spec.name), -1
        while True:
            job = _patiently(lambda: rest.ask("GET", f"{self._scheduler}/{path}"))
            noted = _patiently(lambda: self._noted(path))
            if noted is not None and noted[0] > reported:
                reported = noted[0]
                trial.report(noted[1], reported)
            if job["state"] in ("failed", "cancelled", "ended"):
                return _outcome(spec.name, job, self._metric, noted)
            if noted is not None and trial.should_prune():
                rest.ask("POST", f"{self._scheduler}/{path}/cancel")
                raise optuna.TrialPruned(f"{spec.name} at step {reported}")
            time.sleep(POLL_S)

    def _noted(self, path: str) -> tuple[int, float] | None:
        """Return the newest step of a job that has noted the metric, and its value."""
        try:
            url = f"{self._metadata}/{path}/checkpoints?limit={NOTES_LOOKED_AT}"
            rows = rest.ask("GET", url)
        except NotFoundError:
            return None  # it has saved nothing yet
        for row in rows:
            value = row["notes"].get(self._metric)
            if not row["superseded"] and isinstance(value, int | float) and math.isfinite(value):
                return int(row["step"]), float(value)
        return None


def job_of(study: str, command: Sequence[str]) -> str:
    """Return the name of the job with that command."""
    said = "\0".join(command).encode()
    return f"{study}-{hashlib.blake2b(said, digest_size=5).hexdigest()}"


def _outcome(
    name: str, job: Mapping[str, Any], metric: str, noted: tuple[int, float] | None
) -> float:
    if job["state"] == "failed":
        raise PreconditionError(f"{name} failed: {job['message']}", job=name)
    if job["state"] == "cancelled":
        raise optuna.TrialPruned(f"{name} was cancelled: {job['message']}")
    if noted is None:
        raise PreconditionError(
            f'{name} has ended and noted no {metric!r}: save with notes={{"{metric}": …}}', job=name
        )
    return noted[1]


def _patiently(ask: Callable[[], Any]) -> Any:
    """Return the answer of a service that may be out for a while."""
    ends_s = time.monotonic() + OUT_S_MAX
    while True:
        try:
            return ask()
        except UnavailableError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(POLL_S)
