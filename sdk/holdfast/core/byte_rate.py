"""A byte rate as a bucket that may owe: who takes more than is there waits. Pure; no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

BURST_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``level_bytes`` as of ``at_s``; below 0 it is what has been promised and is not there yet.

    ``rate_bytes_per_s`` is more than 0.
    """

    rate_bytes_per_s: float
    level_bytes: float = 0.0
    at_s: float = 0.0


def take(bucket: Bucket, length_bytes: int, now_s: float) -> tuple[Bucket, float]:
    """Return the bucket after ``length_bytes`` were promised, and how long to wait for them.

    A clock that steps back fills nothing. At most ``BURST_S`` of the rate is saved up.
    """
    rate = bucket.rate_bytes_per_s
    filled = bucket.level_bytes + max(0.0, now_s - bucket.at_s) * rate
    level = min(filled, rate * BURST_S) - length_bytes
    return replace(bucket, level_bytes=level, at_s=max(now_s, bucket.at_s)), max(0.0, -level / rate)
