"""What becomes of a job that has failed: again, after a pause, or for good (F105)."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.retry import Waits
from holdfast_services.scheduler.domain.job import Job, State, moved, released

OUTSIDE_PER_HOUR_MAX = 20
HOUR_S = 3600.0
PAUSES = Waits(first_s=1.0, wait_s_max=300.0)


def of_script(job: Job, reason: str, number: int, now_s: float) -> Job:
    """Return the job whose script has failed for good: it begins again if it may."""
    failures = job.script_failures + 1
    job = replace(released(job, number, now_s), script_failures=failures)
    if failures > job.spec.retries:
        return moved(job, State.FAILED, now_s, reason)
    text = f"its script has failed, try {failures} of {job.spec.retries} follows: {reason}"
    paused = replace(job, not_before_s=now_s + PAUSES.wait_s(failures))
    return moved(paused, State.QUEUED, now_s, text)


def from_outside(job: Job, reason: str, number: int, now_s: float) -> Job:
    """Return the job that something else than its script has ended: it begins again."""
    job = struck(released(job, number, now_s), now_s)
    if worn_out(job):
        return moved(job, State.FAILED, now_s, f"{_many(job)}; the last: {reason}")
    pause_s = PAUSES.wait_s(len(job.outside_at_s))
    paused = replace(job, not_before_s=now_s + pause_s)
    return moved(paused, State.QUEUED, now_s, f"begins again in {pause_s:.0f} s: {reason}")


def struck(job: Job, now_s: float) -> Job:
    """Return the job with one more failure from outside."""
    recent = tuple(at_s for at_s in job.outside_at_s if now_s - HOUR_S < at_s <= now_s)
    return replace(job, outside_at_s=(*recent, now_s))


def worn_out(job: Job) -> bool:
    """Tell whether it has failed too often within an hour."""
    return len(job.outside_at_s) > OUTSIDE_PER_HOUR_MAX


def _many(job: Job) -> str:
    return f"{len(job.outside_at_s)} failures within an hour that were not its script's"
