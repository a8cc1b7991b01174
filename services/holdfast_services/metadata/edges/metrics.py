"""Figures for Prometheus: of the catalogue, the object tier and this process (F110)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import SummaryMetricFamily

from holdfast_services.kit.exposition import counter, exposition, gauge
from holdfast_services.metadata.calls.health import waiting_count
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.cost_figures import cost_families
from holdfast_services.metadata.edges.ledgers import ledger_family
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.transactor import Transactor

RDMA = "rdma"
"""The kind of endpoint."""


async def text(transactor: Transactor, reports: Reports, objects: ObjectTier) -> str:
    """Return the figures in the text format; each name has its unit last."""
    world = await transactor.world()
    families = [*_memory(world), *await _objects(transactor, objects), *_process(reports)]
    of_jobs = (*cost_families(world), *ledger_family(world), *transactor.histograms.families())
    return exposition((*families, *of_jobs))


def _memory(world: World) -> Iterator[Metric]:
    rows = [row for run in world.runs for row in run.checkpoints]
    used_bytes = sum(node.inventory.used_bytes for node in world.live.values())
    replicated = sum(row.replicated_at_s is not None for row in rows)
    rdma = sum(map(_serves_rdma, world.live.values()))
    yield gauge("holdfast_nodes_live", "Nodes whose agents report.", len(world.live))
    yield gauge("holdfast_nodes_known", "Nodes that reported within a week.", len(world.nodes))
    yield gauge("holdfast_nodes_serving_rdma", "Live nodes that serve over RDMA.", rdma)
    yield gauge("holdfast_jobs_active", "Jobs that train or have memory.", len(world.runs))
    yield gauge("holdfast_checkpoints", "Checkpoints that nodes have in memory.", len(rows))
    yield gauge("holdfast_checkpoints_replicated", "Of these, with all copies.", replicated)
    yield gauge("holdfast_arena_used_bytes", "Memory of all slots of live nodes.", used_bytes)


def _serves_rdma(node: Node) -> bool:
    return any(endpoint.kind == RDMA for endpoint in node.inventory.node.endpoints)


async def _objects(transactor: Transactor, objects: ObjectTier) -> list[Metric]:
    now_s, tier = await transactor.read(lambda c: (c.now_s(), c.tier_counts()))
    age_s = max(0.0, now_s - tier.draining_since_s) if tier.draining else 0.0
    sent_bytes = tier.draining_stored_bytes
    found = [
        gauge("holdfast_checkpoints_durable", "Checkpoints in the object store.", tier.durable),
        gauge("holdfast_checkpoints_draining", "Checkpoints on their way there.", tier.draining),
        gauge("holdfast_draining_oldest_seconds", "Since when the oldest of them is.", age_s),
        gauge("holdfast_draining_stored_bytes", "What the store has of them.", sent_bytes),
        gauge("holdfast_draining_bytes", "Size of all of them.", tier.draining_bytes),
        gauge("holdfast_durable_bytes", "Size of all in the store.", tier.durable_bytes),
        gauge("holdfast_checkpoints_expired", "Checkpoints that are deleted.", tier.expired),
        gauge("holdfast_checkpoints_bad", "Checkpoints with bad objects.", tier.bad),
        gauge("holdfast_scrubs_asked", "Checkpoints that wait for a check.", tier.scrub_asked),
    ]
    if tier.scrubbed_since_s:
        oldest_s = max(0.0, now_s - tier.scrubbed_since_s)
        about = "Since when the checkpoint that was checked longest ago has not been."
        found.append(gauge("holdfast_scrubbed_oldest_seconds", about, oldest_s))
    waiting = await waiting_count(objects.queue)
    if waiting is not None:
        found.append(gauge("holdfast_queue_waiting", "Work that no worker has taken.", waiting))
    state = await objects.health.state()
    if state.url is not None:
        found.append(gauge("holdfast_store_up", "Whether the store answers.", state.ok))
    return found


def _process(reports: Reports) -> Iterator[Metric]:
    about = "Time to take a report of an agent and to answer."
    yield SummaryMetricFamily("holdfast_report_seconds", about, reports.count, reports.s_sum)
    yield counter(
        "holdfast_transports_left",
        "Fetches that went another way than the best one of both nodes.",
        reports.transports_left_count,
    )
