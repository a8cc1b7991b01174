"""Checks the inventory that an agent sends, once, before any rule uses it.

A rank's bad clock is taken as "not known"; what no agent of ours can send is refused.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.ids import WORLD_SIZE_MAX, job_name, node_name, run_id
from holdfast.core.inventory import Inventory, Peer
from holdfast.core.needs import checked as checked_needs
from holdfast.core.reports import BYTES_MAX, checked
from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

SHARDS_PER_INVENTORY_MAX = 200_000
ENDPOINTS_PER_NODE_MAX = 16
PEER_TEXT_LENGTH_MAX = 300
"""Of each address and of the domain: every node of the cluster is told them of every other."""


def received(inventory: Inventory) -> Inventory:
    """Return an agent's inventory with numbers and texts that rules and database can hold.

    Raises:
        InvalidRequestError: names what no agent can have.
    """
    _check_peer(inventory.node)
    if len(inventory.shards) > SHARDS_PER_INVENTORY_MAX:
        raise InvalidRequestError(
            f"{len(inventory.shards)} shards, at most {SHARDS_PER_INVENTORY_MAX}"
        )
    if inventory.incarnation < 0 or inventory.sequence < 0:
        raise InvalidRequestError("incarnation and sequence must not be negative")
    for job, run in {(h.shard.job, h.shard.id.run) for h in inventory.shards} | {
        (status.job, status.run) for status in inventory.ranks
    }:
        job_name(job)
        run_id(run)
    for held in inventory.shards:
        shard = held.shard
        if not 0 <= shard.id.rank < shard.world_size <= WORLD_SIZE_MAX:
            raise InvalidRequestError(f"shard {shard.id.key} of a world of {shard.world_size}")
        if holds_nul(shard.plan_hash) or not 0 <= shard.length_bytes <= BYTES_MAX:
            raise InvalidRequestError(
                f"shard {shard.id.key} has {shard.length_bytes} bytes and plan "
                f"{shard.plan_hash[:40]!r}: at most {BYTES_MAX} bytes, and no NUL in the plan"
            )
    for status in inventory.ranks:
        if status.needs is not None:
            checked_needs(status.needs)
    ranks = tuple(replace(status, report=checked(status.report)) for status in inventory.ranks)
    return replace(inventory, ranks=ranks)


def _check_peer(peer: Peer) -> None:
    """Refuse a node that would burden all who are told of it."""
    node_name(peer.node)
    count = len(peer.endpoints)
    if count > ENDPOINTS_PER_NODE_MAX:
        raise InvalidRequestError(
            f"node {peer.node} has {count} endpoints, at most {ENDPOINTS_PER_NODE_MAX}"
        )
    addresses = (text for one in peer.endpoints for text in (one.kind, one.address))
    for text in (peer.rpc_address, peer.domain, *addresses):
        if len(text) > PEER_TEXT_LENGTH_MAX or holds_nul(text):
            raise InvalidRequestError(
                f"{text[:40]!r} of node {peer.node}: addresses and domains have at most "
                f"{PEER_TEXT_LENGTH_MAX} characters, none of them NUL"
            )
