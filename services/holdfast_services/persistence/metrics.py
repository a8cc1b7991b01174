"""Figures of one persistence worker for Prometheus (F110): what is known is read when asked for.

Only ends of items are counted as they come, and only where ``/metrics`` is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Counter as Failures
from prometheus_client import Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from holdfast.core.queue_items import Item, Kind
from holdfast.errors import UnavailableError
from holdfast_services.kit.exposition import gauge
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.service import PersistService
from holdfast_services.persistence.worker import Worker

BUCKETS_S = (0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)


class Ends:
    """How items ended; ``ended`` is told of each, from any thread."""

    def __init__(self) -> None:
        self._seconds = Histogram(
            "holdfast_worker_item_seconds",
            "Time to do an item of the queue to its end.",
            ["kind"],
            registry=None,
            buckets=BUCKETS_S,
        )
        self._failures = Failures(
            "holdfast_worker_failures", "Items that failed.", ["kind", "error"], registry=None
        )
        for kind in Kind:  # else Prometheus would not see the first failure as an increase
            self._failures.labels(kind.value, UnavailableError.kind)

    def ended(self, item: Item, error: str, seconds: float) -> None:
        """Count an item that was done after ``seconds``, or failed with a kind of ``error``."""
        if error:
            self._failures.labels(item.kind.value, error).inc()
        else:
            self._seconds.labels(item.kind.value).observe(seconds)

    def families(self) -> Iterator[Metric]:
        """Yield what Prometheus is told."""
        yield from self._seconds.collect()
        yield from self._failures.collect()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """Where the figures of a worker are; reading them changes nothing, and waits for nobody."""

    worker: Worker
    service: PersistService
    pool: PartPool
    ends: Ends = field(default_factory=Ends)

    def families(self) -> Iterator[Metric]:
        """Yield all there is to tell."""
        yield self._moved()
        yield self._items()
        parts = self.pool.waiting_count
        yield gauge("holdfast_worker_parts_waiting", "Parts that no thread has taken.", parts)
        up = self.worker.queue_answers
        yield gauge("holdfast_worker_queue_up", "Whether the queue answers.", up)
        yield from self.ends.families()

    def _moved(self) -> Metric:
        moved = self.service.moved
        found = CounterMetricFamily(
            "holdfast_worker_drained_bytes", "How bytes got into the store.", labels=["how"]
        )
        found.add_metric(["sent"], moved.sent_bytes)
        found.add_metric(["copied"], moved.copied_bytes)
        found.add_metric(["kept"], moved.kept_bytes)
        return found

    def _items(self) -> Metric:
        counts = Counter(self.worker.kinds_under_way())
        found = GaugeMetricFamily(
            "holdfast_worker_items", "Items of the queue under way.", labels=["kind"]
        )
        for kind in Kind:
            found.add_metric([kind.value], counts[kind])
        return found
