"""Figures for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from holdfast_services.kit.exposition import exposition, gauge
from holdfast_services.scheduler.domain.job import OVER, State
from holdfast_services.scheduler.usecases.reading import Seen


def figures(seen: Seen) -> str:
    """Return the figures in the text format."""
    return exposition((_jobs(seen), *_cluster(seen), *_plan(seen)))


def _jobs(seen: Seen) -> Metric:
    counts = Counter(job.state for job in seen.jobs)
    found = GaugeMetricFamily(
        "holdfast_scheduler_jobs", "Jobs that are not over.", labels=["state"]
    )
    for state in State:
        if state not in OVER:
            found.add_metric([state.value], counts[state])
    return found


def _cluster(seen: Seen) -> Iterator[Metric]:
    nodes = seen.cluster.nodes.values()
    usable = [node for node in nodes if not node.hindrance(seen.now_s)]
    gpus = sum(node.gpus for node in usable)
    granted = sum(job.gpus for job in seen.jobs)
    out = seen.lease.metadata_out_since_s
    held = seen.lease.until_s > seen.now_s
    yield gauge("holdfast_scheduler_nodes", "Nodes that have had executors.", len(nodes))
    yield gauge("holdfast_scheduler_nodes_usable", "Where jobs may begin now.", len(usable))
    yield gauge("holdfast_scheduler_gpus", "GPUs of these nodes.", gpus)
    yield gauge("holdfast_scheduler_gpus_granted", "GPUs that jobs have.", granted)
    yield gauge("holdfast_scheduler_metadata_up", "Whether metadata answers.", not out)
    yield gauge("holdfast_scheduler_held", "Whether a scheduler holds the lease.", held)


def _plan(seen: Seen) -> Iterator[Metric]:
    plan = seen.plan
    age_s = seen.now_s - plan.made_at_s if plan else 0.0
    yield gauge("holdfast_scheduler_plan_number", "Newest plan.", plan.number if plan else 0)
    yield gauge("holdfast_scheduler_plan_seconds", "How long it took.", plan.took_s if plan else 0)
    yield gauge("holdfast_scheduler_plan_age_seconds", "How old it is.", age_s)
