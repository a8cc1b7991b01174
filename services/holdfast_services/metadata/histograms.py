"""Histograms of what took its time, by job, of what this process has committed.

Each of several metadata processes counts its own commits; Prometheus adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram, Metric

from holdfast_services.metadata.domain.durations import Span, took
from holdfast_services.metadata.domain.model import Run

JOBS_COUNT_MAX = 100
"""Jobs that have histograms of their own, the first that came; others share that of no name."""
BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)


class Histograms:
    """Counts durations; ``saved`` after each commit. Lives as long as the process."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._by_span = {
            span: Histogram(name(span), span.value, ["job"], registry=None, buckets=BUCKETS_S)
            for span in Span
        }

    def saved(self, before: Run, after: Run) -> None:
        """Count what has ended between two states of a run."""
        for one in took(before, after):
            self._by_span[one.span].labels(self._label(after.job)).observe(one.seconds)

    def families(self) -> Iterator[Metric]:
        """Yield what Prometheus is told."""
        for histogram in self._by_span.values():
            yield from histogram.collect()

    def _label(self, job: str) -> str:
        if job not in self._jobs and len(self._jobs) < JOBS_COUNT_MAX:
            self._jobs.add(job)
        return job if job in self._jobs else ""


def name(span: Span) -> str:
    """Return the name of a span's family."""
    return f"holdfast_{span.name.lower()}_seconds"
