"""Stripes of parity as inventories show them: which elements lie where, what they protect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.ids import CheckpointId
from holdfast.core.protection import Domains, Parity
from holdfast.core.shard import Shard
from holdfast.core.sources import Rebuilt
from holdfast.core.stripes import Piece, Stripe
from holdfast_services.metadata.domain.model import Node

Holders = Callable[[Shard], Collection[str]]
"""The nodes that have exactly this shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStripe:
    """A stripe of which at least one element lies somewhere; ``elements`` are in order."""

    stripe: Stripe
    elements: tuple[Piece, ...]

    def pieces(self, holders: Holders) -> tuple[Piece, ...]:
        """Return what of the stripe is there: members, then elements."""
        return (*members_of(self.stripe, holders), *self.elements)

    def survives(self, asked: Parity, holders: Holders, domains: Domains) -> bool:
        """Tell whether all members are there and outlive as many losses as ``asked``."""
        return self.losses(asked, holders, domains) >= asked.m

    def losses(self, asked: Parity, holders: Holders, domains: Domains) -> int:
        """Return how many losses all members outlive; below 0: some may not be there."""
        pieces = self.pieces(holders)
        count = len(self.stripe.members)
        if sum(not piece.is_element for piece in pieces) < count:
            return -1
        return asked.losses_survived([p.nodes for p in pieces], count, domains)

    def without(self, number: int, node: str) -> HeldStripe:
        """Return what is left of it once ``node`` has given back that element."""
        left = (
            replace(piece, nodes=tuple(n for n in piece.nodes if n != node))
            if piece.number == number
            else piece
            for piece in self.elements
        )
        return replace(self, elements=tuple(piece for piece in left if piece.nodes))

    def rebuilds(self, member: Shard, holders: Holders) -> Rebuilt | None:
        """Return the source that the rest of the stripe is for a member; None: too little of it."""
        number = self.stripe.members.index(member)
        others = tuple(
            piece for piece in self.pieces(holders) if piece.is_element or piece.number != number
        )
        enough = len(others) >= len(self.stripe.members)
        return Rebuilt(self.stripe, others) if enough else None


def members_of(stripe: Stripe, holders: Holders) -> tuple[Piece, ...]:
    """Return the members that somebody has."""
    found = []
    for number, shard in enumerate(stripe.members):
        nodes = tuple(sorted(holders(shard)))
        if nodes:
            root = shard.root_digest
            found.append(Piece(number=number, is_element=False, nodes=nodes, root_digest=root))
    return tuple(found)


def held_stripes(run: str, nodes: Iterable[Node]) -> Mapping[CheckpointId, Sequence[HeldStripe]]:
    """Return the stripes of a run that ``nodes`` have elements of, by checkpoint, sorted by key.

    Of elements that disagree those count that most nodes have: equal members give equal elements.
    """
    found: dict[Stripe, dict[tuple[int, bytes], list[str]]] = defaultdict(dict)
    for node in nodes:
        for held in node.inventory.elements:
            stripe = held.element.stripe
            if stripe.checkpoint.run == run:
                variant = (held.element.number, held.root_digest)
                found[stripe].setdefault(variant, []).append(node.name)
    stripes: dict[CheckpointId, list[HeldStripe]] = defaultdict(list)
    for stripe, variants in found.items():
        best: dict[int, Piece] = {}
        for (number, root), names in sorted(variants.items()):
            known = best.get(number)
            if known is None or len(names) > len(known.nodes):
                best[number] = Piece(
                    number=number, is_element=True, nodes=tuple(sorted(names)), root_digest=root
                )
        elements = tuple(best[number] for number in sorted(best))
        stripes[stripe.checkpoint].append(HeldStripe(stripe=stripe, elements=elements))
    return {key: sorted(held, key=_name) for key, held in stripes.items()}


def _name(held: HeldStripe) -> str:
    return held.stripe.key
