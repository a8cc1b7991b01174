"""Which elements of parity a node should make.

Deterministic, so that every metadata process tells every node the same: stripes follow from
the ring and from who holds what, and one that was begun goes on if it would be chosen again. An
element that has come to lie beside a member, or another element, is made again elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.ids import ShardId
from holdfast.core.node_view import ElementWant
from holdfast.core.protection import Domains, Parity
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    holders_in,
    whole,
)
from holdfast_services.metadata.domain.copies_to_fetch import (
    Places,
    places,
    protected_checkpoints,
)
from holdfast_services.metadata.domain.held_stripes import HeldStripe, members_of
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.domain.shortage import striped

ELEMENTS_IN_VIEW_MAX = 16
"""Named at a time; once they are made and reported, others are."""

Elements = Mapping[str, tuple[ElementWant, ...]]


def elements_to_make(run: Run, evidence: Evidence, live: Mapping[str, Node]) -> Elements:
    """Return node -> elements it should make; while a restore is decided none."""
    asked = run.attempt.allowed if run.attempt else None
    if not isinstance(asked, Parity) or not asked.m or run.deciding:
        return {}
    where = places(run, live)
    found: dict[str, list[ElementWant]] = {}
    for key in protected_checkpoints(run):
        copies = evidence.live.get(key, {})
        if not whole(copies):
            continue
        for node, want in _missing(asked, copies, evidence.stripes.get(key, ()), where):
            found.setdefault(node, []).append(want)
    return {node: tuple(wants[:ELEMENTS_IN_VIEW_MAX]) for node, wants in found.items()}


def _missing(
    asked: Parity, copies: CheckpointCopies, stripes: Sequence[HeldStripe], where: Places
) -> Iterable[tuple[str, ElementWant]]:
    holders = holders_in(copies)
    safe = striped(asked, copies, where.domains, stripes)
    bare = {
        key
        for key, item in copies.items()
        if key not in safe and not asked.met(item.nodes, where.domains)
    }
    if not bare:
        return
    begun = {held.stripe: held for held in stripes}
    homes = _homes(copies, where)
    for stripe in _chosen(asked, copies, homes, bare, where):
        members = [homes[shard.id] for shard in stripe.members]
        made, used = _made(asked, begun.get(stripe), members, where.domains)
        nodes = asked.element_nodes(members, where.ring, where.domains)
        numbers = (number for number in range(stripe.elements_count) if number not in made)
        free = (node for node in nodes if asked.place(node, where.domains) not in used)
        for number, node in zip(numbers, free, strict=False):
            element = Element(stripe=stripe, number=number)
            yield node, ElementWant(element=element, pieces=members_of(stripe, holders))


def _made(
    asked: Parity, held: HeldStripe | None, members: Sequence[str], domains: Domains
) -> tuple[set[int], set[str]]:
    """Return the elements that lie apart from members and each other, and all places in use."""
    used = {asked.place(node, domains) for node in members}
    made: set[int] = set()
    for piece in held.elements if held else ():
        places_of = (asked.place(node, domains) for node in piece.nodes)
        apart = next((place for place in places_of if place not in used), None)
        if apart is not None:
            made.add(piece.number)
            used.add(apart)
    return made, used


def _homes(copies: CheckpointCopies, where: Places) -> Mapping[ShardId, str]:
    """Return the node that each shard counts for: its owner's, else the first that has it."""
    turns = where.turns
    return {
        key: item.owner
        if item.owner in item.nodes
        else min(item.nodes, key=lambda node: turns.get(node, 0))
        for key, item in copies.items()
    }


def _chosen(
    asked: Parity,
    copies: CheckpointCopies,
    homes: Mapping[ShardId, str],
    bare: Collection[ShardId],
    where: Places,
) -> Iterable[Stripe]:
    """Yield the stripes that all ``bare`` shards are put into.

    First those of the whole checkpoint, which do not depend on what was made of them already; what
    is bare in one where others are not is put together anew.
    """
    left: list[ShardId] = []
    for keys in _stripes(asked, sorted(copies), homes, where):
        if all(key in bare for key in keys):
            yield _stripe(asked, [copies[key].shard for key in keys])
        else:
            left += [key for key in keys if key in bare]
    for keys in _stripes(asked, sorted(left), homes, where):
        yield _stripe(asked, [copies[key].shard for key in keys])


def _stripes(
    asked: Parity, keys: Sequence[ShardId], homes: Mapping[ShardId, str], where: Places
) -> Iterable[list[ShardId]]:
    at: dict[str, list[ShardId]] = {}
    for key in keys:
        at.setdefault(homes[key], []).append(key)
    for turn in range(max(map(len, at.values()), default=0)):
        nodes = [node for node in where.ring if len(at.get(node, ())) > turn]
        for group in asked.groups(nodes, where.ring, where.domains, turn=turn):
            yield [at[node][turn] for node in group]


def _stripe(asked: Parity, shards: Sequence[Shard]) -> Stripe:
    return Stripe(members=tuple(shards), elements_count=asked.m)
