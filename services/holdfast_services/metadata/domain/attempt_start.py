"""Where an attempt begins that does not want the newest checkpoint: at step 0, or at an older one.

A script says so at every launch, also when its launcher starts it again after a crash. Taken at
its word each time, it would throw away all that it had trained since. So a start has a name,
which stays the same through restarts, and is made once: who brings the name again goes on from
the newest checkpoint, whatever became of the attempts between.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from holdfast.core.decision import Start
from holdfast.core.ids import STEP_MAX, CheckpointId
from holdfast.core.user_events import Event
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain.model import Attempt, Run

NAME_LENGTH_MAX = 300
STARTS_PER_RUN_MAX = 32


def check(start: Start | None, job: str) -> None:
    """Refuse a start that cannot be kept.

    Raises:
        InvalidRequestError: the name is empty or too long, or the step is none.
    """
    if start and not (0 < len(start.name) <= NAME_LENGTH_MAX and 0 <= start.step <= STEP_MAX):
        raise InvalidRequestError(f"start {start} of {job} is not possible", job=job)


def is_due(run: Run, start: Start | None) -> bool:
    """Tell whether an attempt of ``run`` has still to make ``start``."""
    return start is not None and start.name not in run.started


def wished(run: Run, key: CheckpointId) -> bool:
    """Tell whether the newest attempt accepts ``key``: any, unless it asks for one step."""
    start = run.attempt.spec.start if run.attempt and run.attempt.start_due else None
    return start is None or key.step == start.step


def unbound(run: Run) -> Run:
    """Return the run as if its attempt accepted any checkpoint."""
    return replace(run, attempt=replace(run.attempt, start_due=False)) if run.attempt else run


def made(run: Run, attempt: Attempt) -> Run:
    """Return the run with the attempt's start made, if it had one to make."""
    if attempt.spec.start is None or not attempt.start_due:
        return run
    return replace(run, started=(*run.started, attempt.spec.start.name)[-STARTS_PER_RUN_MAX:])


def text_of(start: Start | None) -> str:
    """Return where ``start`` begins, for people."""
    if start is None:
        return "the newest checkpoint"
    return "step 0" if start.fresh else f"the checkpoint of step {start.step}"


def repeated(run: Run, attempt: Attempt) -> tuple[Event, ...]:
    """Return the news that an attempt's start was made before, if it was."""
    if attempt.spec.start is None or attempt.start_due:
        return ()
    where = text_of(attempt.spec.start)
    text = (
        f"attempt {attempt.generation} of {run.job} asks to begin at {where}; its launch "
        f"has done so once already, so training goes on from the newest checkpoint"
    )
    context = {"run": run.id, "attempt": str(attempt.generation)}
    return (
        Event(kind="start_repeated", severity="info", message=text, job=run.job, context=context),
    )


def first_run(job: str) -> str:
    """Return the id of a job's first run: 12 hex digits that follow from the name.

    So a catalogue that was lost finds the run again in what the agents hold (P6).
    """
    return hashlib.blake2b(job.encode(), digest_size=6).hexdigest()
