"""What Prometheus is told: families of figures, in its text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# Series that say when each of the others began.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Told(Collector):
    families: tuple[Metric, ...]

    def collect(self) -> Iterator[Metric]:
        yield from self.families


def exposition(families: Iterable[Metric]) -> str:
    """Return families in the text format."""
    return generate_latest(_Told(tuple(families))).decode()


def gauge(name: str, about: str, value: float) -> Metric:
    """Return a gauge without labels; its name has its unit last."""
    return GaugeMetricFamily(name, about, value=value)


def counter(name: str, about: str, value: float) -> Metric:
    """Return a counter without labels, which is told as ``name_total``."""
    return CounterMetricFamily(name, about, value=value)
