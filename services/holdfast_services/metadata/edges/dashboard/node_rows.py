"""Nodes on one page, what needs a look first: lost ones, then by how full they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from holdfast.core.byte_sizes import format_bytes
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard.paging import page_of
from holdfast_services.metadata.edges.dashboard.texts import ago, counted

NODES_PER_PAGE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which nodes somebody wants to see: whose name or domain has ``name`` in it."""

    name: str = ""
    page: int = 1

    def path(self, page: int) -> str:
        """Return the address of another page with the same filter."""
        fields = {"name": self.name, "page": str(page) if page > 1 else ""}
        query = urlencode({name: value for name, value in fields.items() if value})
        return f"/nodes?{query}" if query else "/nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node; ``percent`` is how full its budget is."""

    node: str
    live: bool
    lease: str
    reported: str
    domain: str
    memory: str
    percent: int
    shards: int
    elements: int
    ranks: int
    transports: tuple[str, ...]
    rpc_address: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A page of nodes, and all of them in one line."""

    asked: Asked
    nodes: tuple[NodeRow, ...]
    summary: str
    newer: str
    older: str
    place: str


def nodes_page(asked: Asked, world: World) -> Nodes:
    """Return the page."""
    wanted = asked.name.lower()
    found = [
        node
        for node in world.nodes.values()
        if wanted in node.name.lower() or wanted in node.inventory.node.domain.lower()
    ]
    found.sort(key=lambda node: (node.live(world.now_s), -_fill(node), node.name))
    page = page_of(found, asked.page, NODES_PER_PAGE, asked.path)
    return Nodes(
        asked=asked,
        nodes=tuple(_row(node, world.now_s) for node in page.shown),
        summary=_summary(found, world.now_s),
        newer=page.newer,
        older=page.older,
        place=page.place,
    )


def _summary(nodes: Sequence[Node], now_s: float) -> str:
    live = [node for node in nodes if node.live(now_s)]
    used = sum(node.inventory.used_bytes for node in live)
    budget = sum(node.inventory.budget_bytes for node in live)
    domains = {node.inventory.node.domain for node in live} - {""}
    parts = [
        f"{len(live):,} of {counted(len(nodes), 'node')} live",
        f"{format_bytes(used)} used of {format_bytes(budget)} promised to Holdfast",
        counted(sum(_ranks(node) for node in live), "rank"),
    ]
    parts += [counted(len(domains), "failure domain")] if domains else []
    return " · ".join(parts)


def _row(node: Node, now_s: float) -> NodeRow:
    inventory = node.inventory
    live = node.live(now_s)
    left_s = node.lease_until_s - now_s
    return NodeRow(
        node=node.name,
        live=live,
        lease=f"{left_s:.1f} s left" if live else "lost" if node.lease_until_s else "has left",
        reported=ago(node.reported_at_s, now_s),
        domain=inventory.node.domain,
        memory=f"{format_bytes(inventory.used_bytes)} of {format_bytes(inventory.budget_bytes)}",
        percent=round(100 * min(1.0, _fill(node))),
        shards=len(inventory.shards),
        elements=len(inventory.elements),
        ranks=_ranks(node),
        transports=tuple(f"{one.kind} {one.address}" for one in inventory.node.endpoints),
        rpc_address=inventory.node.rpc_address,
        life=inventory.incarnation,
    )


def _ranks(node: Node) -> int:
    return sum(status.live for status in node.inventory.ranks)


def _fill(node: Node) -> float:
    return node.inventory.used_bytes / max(1, node.inventory.budget_bytes)
