"""What the catalogue knows of a checkpoint's life, as spans of its trace."""

from __future__ import annotations

from holdfast_services.kit.otlp import Traces
from holdfast_services.metadata.domain.durations import committed, took
from holdfast_services.metadata.domain.model import Run


def tell(traces: Traces, before: Run, after: Run) -> None:
    """Send what has begun and ended between two states of a run."""
    for row in committed(before, after):
        about = {"ranks": row.world_size, "bytes": row.length_bytes}
        traces.began(row.id, row.local_at_s, job=after.job, **about)
    for one in took(before, after):
        if one.of is not None:
            span = one.span.name.lower()
            traces.ended(span, one.of, one.seconds, end_s=one.end_s, job=after.job)
