"""Figures for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast_services.scheduler.domain.job import OVER, State
from holdfast_services.scheduler.usecases.reading import Seen


def figures(seen: Seen) -> str:
    """Return the figures in the text format."""
    return "".join(f"{line}\n" for line in _lines(seen))


def _lines(seen: Seen) -> Iterator[str]:
    counts = Counter(job.state for job in seen.jobs)
    yield "# TYPE holdfast_scheduler_jobs gauge"
    for state in State:
        if state not in OVER:
            yield f'holdfast_scheduler_jobs{{state="{state.value}"}} {counts[state]}'
    nodes = seen.cluster.nodes.values()
    usable = [node for node in nodes if not node.hindrance(seen.now_s)]
    plan = seen.plan
    values = {
        "holdfast_scheduler_nodes": len(nodes),
        "holdfast_scheduler_nodes_usable": len(usable),
        "holdfast_scheduler_gpus": sum(node.gpus for node in usable),
        "holdfast_scheduler_gpus_granted": sum(job.gpus for job in seen.jobs),
        "holdfast_scheduler_plan_number": plan.number if plan else 0,
        "holdfast_scheduler_plan_seconds": plan.took_s if plan else 0.0,
        "holdfast_scheduler_plan_age_seconds": seen.now_s - plan.made_at_s if plan else 0.0,
        "holdfast_scheduler_metadata_up": int(not seen.lease.metadata_out_since_s),
        "holdfast_scheduler_held": int(seen.lease.until_s > seen.now_s),
    }
    for name, value in values.items():
        yield f"# TYPE {name} gauge"
        yield f"{name} {value:.15g}"
