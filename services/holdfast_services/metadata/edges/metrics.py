"""Figures for Prometheus: of the catalogue, the object tier and this process (F110)."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_services.metadata.calls.health import waiting_count
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.cost_figures import cost_lines
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.transactor import Transactor

RDMA = "rdma"
"""The kind of endpoint."""

_Figure = tuple[str, str, float]


async def text(transactor: Transactor, reports: Reports, objects: ObjectTier) -> str:
    """Return the figures in the text format; each name has its unit last."""
    world = await transactor.world()
    figures = [*_memory(world), *await _objects(transactor, objects), *_process(reports)]
    lines = (f"# TYPE {name} {kind}\n{name} {value:.15g}\n" for name, kind, value in figures)
    return "".join((*lines, *cost_lines(world)))


def _memory(world: World) -> Iterator[_Figure]:
    rows = [row for run in world.runs for row in run.checkpoints]
    used_bytes = sum(node.inventory.used_bytes for node in world.live.values())
    replicated = sum(row.replicated_at_s is not None for row in rows)
    yield "holdfast_nodes_live", "gauge", len(world.live)
    yield "holdfast_nodes_known", "gauge", len(world.nodes)
    yield "holdfast_nodes_serving_rdma", "gauge", sum(map(_serves_rdma, world.live.values()))
    yield "holdfast_jobs_active", "gauge", len(world.runs)
    yield "holdfast_checkpoints", "gauge", len(rows)
    yield "holdfast_checkpoints_replicated", "gauge", replicated
    yield "holdfast_arena_used_bytes", "gauge", used_bytes


def _serves_rdma(node: Node) -> bool:
    return any(endpoint.kind == RDMA for endpoint in node.inventory.node.endpoints)


async def _objects(transactor: Transactor, objects: ObjectTier) -> list[_Figure]:
    now_s, tier = await transactor.read(lambda c: (c.now_s(), c.tier_counts()))
    age_s = max(0.0, now_s - tier.draining_since_s) if tier.draining else 0.0
    found: list[_Figure] = [
        ("holdfast_checkpoints_durable", "gauge", tier.durable),
        ("holdfast_checkpoints_draining", "gauge", tier.draining),
        ("holdfast_draining_oldest_seconds", "gauge", age_s),
        ("holdfast_draining_stored_bytes", "gauge", tier.draining_stored_bytes),
        ("holdfast_draining_bytes", "gauge", tier.draining_bytes),
        ("holdfast_durable_bytes", "gauge", tier.durable_bytes),
        ("holdfast_checkpoints_expired", "gauge", tier.expired),
        ("holdfast_checkpoints_bad", "gauge", tier.bad),
        ("holdfast_scrubs_asked", "gauge", tier.scrub_asked),
    ]
    if tier.scrubbed_since_s:
        oldest_s = max(0.0, now_s - tier.scrubbed_since_s)
        found.append(("holdfast_scrubbed_oldest_seconds", "gauge", oldest_s))
    waiting = await waiting_count(objects.queue)
    if waiting is not None:
        found.append(("holdfast_queue_waiting", "gauge", waiting))
    state = await objects.health.state()
    if state.url is not None:
        found.append(("holdfast_store_up", "gauge", state.ok))
    return found


def _process(reports: Reports) -> Iterator[_Figure]:
    yield "holdfast_report_seconds_sum", "counter", reports.s_sum
    yield "holdfast_report_seconds_count", "counter", reports.count
    yield "holdfast_transports_left", "counter", reports.transports_left_count
