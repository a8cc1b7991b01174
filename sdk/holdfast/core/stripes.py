"""Stripes of parity: which shards are summed up together, on which nodes the elements lie. Pure.

Nodes of the ring form groups; the shards of the same turn on each node of a group are a stripe,
and its elements lie on nodes outside. What an element *is*, ``format.parity`` says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from holdfast.core.ids import CheckpointId
from holdfast.core.placement import place
from holdfast.core.shard import Shard

_ELEMENT = re.compile(r"[a-z0-9]{1,32}/[0-9]{1,18}/[0-9]{1,18}/parity/[0-9a-f]{32}/[0-9]{1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Shards of one checkpoint, in the order of their weights, and how many elements they have.

    Equal members give equal elements, whoever makes them, so a stripe is named by its members.
    """

    members: tuple[Shard, ...]
    elements_count: int

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint of all members."""
        return self.members[0].id.checkpoint

    @property
    def length_bytes(self) -> int:
        """The length of each element: that of the longest member."""
        return max(shard.length_bytes for shard in self.members)

    @property
    def key(self) -> str:
        """The text form: the checkpoint, and a digest of the members with their roots."""
        named = hashlib.blake2b(digest_size=16)
        for shard in self.members:
            named.update(f"{shard.id.key} {shard.length_bytes} ".encode() + shard.root_digest)
        named.update(f"{self.elements_count}".encode())
        at = self.checkpoint
        return f"{at.run}/{at.step}/{at.generation}/parity/{named.hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One element of a stripe, counted from 0."""

    stripe: Stripe
    number: int

    @property
    def key(self) -> str:
        """The text form, under which its bytes are served: a look-up key, never a path."""
        return f"{self.stripe.key}/{self.number}"


def is_element_key(text: str) -> bool:
    """Tell whether ``text`` has the form of ``Element.key``."""
    return _ELEMENT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A member or an element of a stripe, by its number, and the nodes that have it, sorted.

    ``root_digest`` is that of the bytes there.
    """

    number: int
    is_element: bool
    nodes: tuple[str, ...]
    root_digest: bytes


def groups(
    nodes: Sequence[str], ring: Sequence[str], *, size: int, elements: int, turn: int = 0,
    domains: Mapping[str, str] | None = None,
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    """Return the groups of nodes whose shards are summed up together, in the order of the ring.

    Each turn begins at another node, so that over all of them nodes get their share of elements.
    Each node is in one, no two of one failure domain are in the same, and outside of each are as
    many places as it has elements. So groups may be smaller than ``size``.

    Args:
        nodes: Those that have shards, in placement order.
        ring: All nodes that may hold elements, in placement order.
        size: Most nodes in a group, >= 1.
        elements: Elements of each stripe.
        turn: Which shard of each node it is about, counted from 0.
        domains: node -> failure domain, or None when every node is its own.
    """
    places_count = len({place(node, domains) for node in ring})
    most = min(size, places_count - elements)
    if most < 1 or elements < 1:
        return ()
    begin = turn * elements % (len(nodes) or 1)
    left, found = [*nodes[begin:], *nodes[:begin]], []
    while left:
        groups_left = -(-len(left) // most)
        count = -(-len(left) // groups_left)
        group: dict[str, str] = {}
        passed: list[str] = []
        rest = iter(left)
        while len(group) < count and (node := next(rest, None)) is not None:
            if group.setdefault(place(node, domains), node) != node:
                passed.append(node)
        found.append(tuple(group.values()))
        left = [*passed, *rest]
    return tuple(found)


def element_nodes(
    members: Sequence[str], ring: Sequence[str], *, elements: int,
    domains: Mapping[str, str] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Return the nodes that should hold the elements of a stripe, by number.

    Walks the ring from the node after the last member, leaving places that have a member or an
    element. Fewer come back when there are not enough places.

    Args:
        members: The nodes of the members, in their order.
        ring: All nodes that may hold elements, in placement order.
        elements: How many there should be.
        domains: node -> failure domain, or None when every node is its own.
    """
    used = {place(node, domains) for node in members}
    start = ring.index(members[-1]) + 1 if members and members[-1] in ring else 0
    chosen: list[str] = []
    for node in chain(islice(ring, start, None), islice(ring, start)):
        if len(chosen) == elements:
            break
        where = place(node, domains)
        if where not in used:
            used.add(where)
            chosen.append(node)
    return tuple(chosen)


def losses_survived(
    pieces: Sequence[Collection[str]], members_count: int, domains: Mapping[str, str] | None = None
) -> int:
    """Return how many places can be lost, whichever they are, with all members still to be had.

    Each lost place takes at most one piece of those that lie in places of their own; pieces that
    do not are counted as lost. Below 0: members could be lost already.

    Args:
        pieces: The nodes of each piece that is there, members and elements alike.
        members_count: Of the stripe; as many pieces are needed.
        domains: node -> failure domain, or None when every node is its own.
    """
    places = [sorted({place(node, domains) for node in nodes}) for nodes in pieces]
    taken: dict[str, int] = {}

    def settle(piece: int, tried: set[str]) -> bool:
        for where in places[piece]:
            if where in tried:
                continue
            tried.add(where)
            if where not in taken or settle(taken[where], tried):
                taken[where] = piece
                return True
        return False

    return sum(settle(piece, set()) for piece in range(len(places))) - members_count
