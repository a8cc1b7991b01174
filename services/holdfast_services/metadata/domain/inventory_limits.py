"""Checks the inventory that an agent sends, once, before any rule uses it.

A rank's bad clock is taken as "not known"; what no agent of ours can send is refused.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.ids import WORLD_SIZE_MAX, job_name, node_name, run_id
from holdfast.core.inventory import Inventory, Peer
from holdfast.core.needs import checked as checked_needs
from holdfast.core.reports import BYTES_MAX, checked
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element
from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError
from holdfast.format.parity import ELEMENTS_MAX, MEMBERS_MAX

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
    for count, what in ((len(inventory.shards), "shards"), (len(inventory.elements), "elements")):
        if count > SHARDS_PER_INVENTORY_MAX:
            raise InvalidRequestError(f"{count} {what}, at most {SHARDS_PER_INVENTORY_MAX}")
    if inventory.incarnation < 0 or inventory.sequence < 0:
        raise InvalidRequestError("incarnation and sequence must not be negative")
    for held in inventory.elements:
        _check_element(held.element)
    members = [m for h in inventory.elements for m in h.element.stripe.members]
    shards = [*(held.shard for held in inventory.shards), *members]
    for job, run in {(shard.job, shard.id.run) for shard in shards} | {
        (status.job, status.run) for status in inventory.ranks
    }:
        job_name(job)
        run_id(run)
    for shard in shards:
        _check_shard(shard)
    for status in inventory.ranks:
        if status.needs is not None:
            checked_needs(status.needs)
    ranks = tuple(replace(status, report=checked(status.report)) for status in inventory.ranks)
    return replace(inventory, ranks=ranks)


def _check_shard(shard: Shard) -> None:
    """Refuse a shard that no rank has."""
    if not 0 <= shard.id.rank < shard.world_size <= WORLD_SIZE_MAX:
        raise InvalidRequestError(f"shard {shard.id.key} of a world of {shard.world_size}")
    if holds_nul(shard.plan_hash) or not 0 <= shard.length_bytes <= BYTES_MAX:
        raise InvalidRequestError(
            f"shard {shard.id.key} has {shard.length_bytes} bytes and plan "
            f"{shard.plan_hash[:40]!r}: at most {BYTES_MAX} bytes, and no NUL in the plan"
        )


def _check_element(element: Element) -> None:
    """Refuse an element that no format has."""
    members = element.stripe.members
    if not 0 < len(members) <= MEMBERS_MAX or not (
        0 <= element.number < element.stripe.elements_count <= ELEMENTS_MAX
    ):
        raise InvalidRequestError(
            f"element {element.number} of {element.stripe.elements_count} over {len(members)} "
            f"shards: at most {MEMBERS_MAX} shards and {ELEMENTS_MAX} elements"
        )
    if len({shard.id.checkpoint for shard in members}) > 1:
        raise InvalidRequestError("an element over shards of several checkpoints")


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
