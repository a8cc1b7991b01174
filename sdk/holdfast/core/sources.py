"""Where a shard can be fetched from, as values: a class for each kind. Pure.

Whoever fetches asks the sources in the order in which they are listed. A kind is a class here, a
field of the message ``Source`` with its name in ``rpc.codec``, and what the agent's fetcher does
with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.stripes import Piece, Stripe


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a node, by the node's name."""

    node: str

    def __str__(self) -> str:
        """Name it for people."""
        return f"node {self.node}"


@dataclass(frozen=True, slots=True)
class Object:
    """The object store, under the name that ``format.keys`` gives the shard."""

    def __str__(self) -> str:
        """Name it for people."""
        return "the object store"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Pieces of the shard's stripe, of which as many are taken as it has members.

    Without ``pieces`` it stands for the stripe as a source, whoever has what of it.
    """

    stripe: Stripe
    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        """Name it for people."""
        return f"parity over {len(self.stripe.members)} shards"


Source = Memory | Object | Rebuilt
