"""Whether a job can ever have what it asks for at least (F107)."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.job_spec import JobSpec
from holdfast.errors import ExhaustedError
from holdfast_services.scheduler.domain.cluster import Node

SHOWN_NODES_MAX = 12


def check_fits(spec: JobSpec, nodes: Iterable[Node]) -> None:
    """Refuse a job that all nodes together could not run, were they empty.

    Nothing is known before the first node has reported; then a job waits.

    Raises:
        ExhaustedError: with the sum.
    """
    known = sorted(nodes, key=lambda node: node.name)
    may = {node.name: node.gpus for node in known if not _bar(spec, node)}
    total = sum(may.values())
    if not known or total >= spec.gpus_min:
        return
    terms = [f"{name} {gpus}" for name, gpus in may.items()]
    barred = [f"{node.name} {node.gpus} ({_bar(spec, node)})" for node in known if _bar(spec, node)]
    without = f"; not counted: {_listed(barred)}" if barred else ""
    raise ExhaustedError(
        f"{spec.name} needs at least {spec.gpus_min} GPUs, and all nodes together have {total}: "
        f"{_listed(terms) or 'none'}{without}"
    )


def _bar(spec: JobSpec, node: Node) -> str:
    """Return why a job may never run on a node; empty: it may."""
    if spec.gpu_types and node.gpu_type not in spec.gpu_types:
        return f"type {node.gpu_type or 'not said'}"
    return "spot" if node.spot and not spec.spot else ""


def _listed(terms: list[str]) -> str:
    more = len(terms) - SHOWN_NODES_MAX
    shown = " + ".join(terms[:SHOWN_NODES_MAX])
    return f"{shown} and {more} more" if more > 0 else shown
