"""Numbers and names as a page says them. Pure; seconds and bytes come in, words go out."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

from holdfast.core.ids import CheckpointId
from holdfast.core.save_interval import time_text

AT_S_MAX = 2e11
"""Later than any time that a calendar of four digits shows is no time."""


def counted(count: int, word: str, words: str = "") -> str:
    """Return a number with its word.

    >>> counted(1, "copy", "copies"), counted(10240, "rank")
    ('1 copy', '10,240 ranks')
    """
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def lasted(seconds: float) -> str:
    """Return a time span; what two clocks make negative is none.

    >>> lasted(95.0), lasted(-1.0), lasted(200_000.0)
    ('95 s', '0 s', '2.3 days')
    """
    return f"{seconds / 86400:.1f} days" if seconds >= 172_800 else time_text(max(0.0, seconds))


def ago(at_s: float, now_s: float) -> str:
    """Return how long ago something was.

    >>> ago(100.0, 142.0)
    '42 s ago'
    """
    return f"{lasted(now_s - at_s)} ago"


def clock(at_s: float) -> str:
    """Return a moment in UTC.

    >>> clock(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    if not 0 <= at_s < AT_S_MAX:
        return "unknown"
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def job_path(job: str) -> str:
    """Return the address of a job's page.

    >>> job_path("gpt/small?")
    '/jobs/gpt/small%3F'
    """
    return f"/jobs/{quote(job)}"


def checkpoint_path(job: str, key: CheckpointId, action: str = "") -> str:
    """Return the address of a checkpoint's page, or of something to do with it."""
    tail = f"/{action}" if action else ""
    return f"{job_path(job)}/checkpoints/{key.step}{tail}?generation={key.generation}"
