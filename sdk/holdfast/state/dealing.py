"""How the samples of an epoch are dealt out to ranks, and what of them some steps have used.

The *order* of an epoch is a sequence that all ranks agree on. A *deal* gives its places, from
``begin`` on, to ranks in turn. So what all ranks have used after equally many batches is a piece
from its beginning without a gap: one number, from which any number of ranks can go on. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from holdfast.errors import ManifestError


class Tail(Enum):
    """What becomes of samples that cannot be dealt out equally, fewer than there are ranks.

    ``REPEAT``: so many of the first ones of the order come once more. ``DROP``: they are left out.
    ``UNEVEN``: some ranks have one more than others.
    """

    REPEAT = "repeat"
    DROP = "drop"
    UNEVEN = "uneven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The places of an order of ``length``, from ``begin`` on, for ``ranks`` ranks."""

    length: int
    begin: int = 0
    ranks: int = 1
    tail: Tail = Tail.REPEAT

    @property
    def end(self) -> int:
        """Where it ends; beyond ``length`` the order is repeated."""
        rest = max(0, self.length - self.begin)
        match self.tail:
            case Tail.REPEAT:
                return self.begin + -(-rest // self.ranks) * self.ranks
            case Tail.DROP:
                return self.begin + rest // self.ranks * self.ranks
            case Tail.UNEVEN:
                return self.begin + rest

    def places(self, rank: int) -> range:
        """Return the places of ``rank``, to be taken modulo ``length``."""
        return range(self.begin + rank, self.end, self.ranks)

    def batches(self, batch_size: int, *, drop_last: bool = False) -> int:
        """Return how many batches the rank with the most has; all have as many if it is even."""
        count = len(self.places(0))
        return count // batch_size if drop_last else -(-count // batch_size)

    def used(self, batches: int, batch_size: int, *, drop_last: bool = False) -> int:
        """Return how much of the order is used once each rank was given so many batches.

        After the last batch that is all, also what is left out.
        """
        if batches >= self.batches(batch_size, drop_last=drop_last):
            return self.length
        return min(self.length, self.begin + batches * batch_size * self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the order of an epoch depends on: nothing that changes with ranks.

    ``of`` names who makes it; empty: torch's permutation of seed and epoch.
    """

    of: str
    length: int
    seed: int
    shuffle: bool
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """An order as a ``sampler`` deals it out to one rank, and how much of it all have used."""

    order: Order
    begin: int
    used: int
    ranks: int
    rank: int
    batch_size: int
    drop_last: bool
    tail: Tail
    sampler: str

    def value(self) -> dict[str, object]:
        """Return it as plain data of a state."""
        return asdict(self) | {"tail": self.tail.value}

    def after(self, batches: int) -> dict[str, object]:
        """Return what of the value is another one once each rank was given so many batches."""
        return {"used": self.deal().used(batches, self.batch_size, drop_last=self.drop_last)}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Dealt:
        """Return what ``value`` made a value of.

        Raises:
            ManifestError: it is of nothing that is dealt out.
        """
        try:
            held = {"order": Order(**value["order"]), "tail": Tail(value["tail"])}
            return cls(**{**value, **held})
        except (KeyError, TypeError, ValueError) as cause:
            raise ManifestError(f"this does not say how samples were dealt out: {value}") from cause

    @property
    def is_short(self) -> bool:
        """Whether this rank has a batch less than others, and so ends the epoch before them."""
        most = self.deal().batches(self.batch_size, drop_last=self.drop_last)
        return self.batches < most

    @property
    def batches(self) -> int:
        """How many batches this rank has."""
        count = len(self.deal().places(self.rank))
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def deal(self) -> Deal:
        """Return the deal that this rank has a part of."""
        return Deal(length=self.order.length, begin=self.begin, ranks=self.ranks, tail=self.tail)
