"""The deals of a loader over an ``ElasticIterable``: joins ``lanes`` and torch's loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.state import rng
from holdfast.state.dealing import Order, Tail
from holdfast.state.iterables import ElasticIterable
from holdfast.state.lanes import Batching, LaneDeal, Range
from holdfast.state.samplers import check_order

_MAKE = ("ranks", "rank", "batch_size", "drop_last", "tail", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtLanes:
    """What a loader deals out of an epoch to one rank; ``is_rest``: not the whole of it."""

    order: Order
    deal: LaneDeal
    rank: int
    is_rest: bool

    @property
    def batches(self) -> int:
        """How many batches this rank has."""
        return self.deal.batches(self.rank)

    @property
    def is_short(self) -> bool:
        """Whether this rank has a batch less than others, and so ends the epoch before them."""
        return self.batches < self.deal.batches()

    def value(self) -> dict[str, object]:
        """Return it as plain data of a state, and a tensor."""
        deal = self.deal
        return {
            "lanes": torch.tensor(deal.ranges, dtype=torch.int64) if self.is_rest else None,
            "order": asdict(self.order),
            "ranks": deal.ranks,
            "rank": self.rank,
            "tail": deal.tail.value,
            **asdict(deal.batching),
        }

    def after(self, batches: int) -> dict[str, object]:
        """Return what to say beside once each rank was given so many batches.

        What is left out at the end of an epoch never counts as used; on all ranks alike.
        """
        deal = self.deal
        left = deal.length - min(deal.length, batches * deal.batching.batch_size * deal.ranks)
        return {"given": batches, "used": self.order.length - left}


class LaneDeals:
    """The deals of one loader."""

    is_shared = True
    begins_at_once = True
    """Its iterator asks for samples when it is made, not with the first batch."""

    def __init__(self, loader: DataLoader[Any], data: ElasticIterable[Any]) -> None:
        self._data = data
        self._batching = Batching(
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            workers=max(1, loader.num_workers),
        )

    @property
    def uneven_epoch(self) -> int | None:
        """The epoch of the next pass, if ranks may have unequally many batches in it; else None."""
        is_uneven = self._data.tail is Tail.UNEVEN and self._data.num_replicas > 1
        return self._data.epoch if is_uneven else None

    def nothing(self, order: Order) -> DealtLanes:
        """Return what is to be dealt out of an epoch that other ranks are about to end.

        Raises:
            InvalidRequestError: the lanes here are others.
        """
        check_order(order, self._data.order)
        return self._dealt(order, [], is_rest=True)

    def begun(self, *, alone: bool, made: rng.Stream, first: rng.Stream | None) -> DealtLanes:
        """Return what the newest iterator deals out."""
        del alone, made, first
        return self._dealt(self._data.order, self._data.ranges(self._data.epoch), is_rest=False)

    def read(self, saved: Mapping[str, Any]) -> DealtLanes:
        """Return what was saved, to be dealt out once more by this rank."""
        order, deal = _saved(self._data, saved)
        return self._dealt(order, deal.ranges, is_rest=saved["lanes"] is not None)

    def rest(self, saved: Mapping[str, Any], *, alone: bool) -> DealtLanes:
        """Return what is to be dealt out here of what was saved.

        Raises:
            InvalidRequestError: the lanes here are others.
        """
        del alone
        order, deal = _saved(self._data, saved)
        check_order(order, self._data.order)
        return self._dealt(order, deal.rest(saved["given"]), is_rest=True)

    def is_dealt_anew(self, saved: Mapping[str, Any], here: DealtLanes) -> bool:
        """Tell whether what was saved cannot just be gone on with, or is not to be."""
        value = here.value()
        return self._data.seek or any(saved[name] != value[name] for name in _MAKE)

    def prepare(self) -> None:
        """Have the next iterator read as this loader does: another may have the same data."""
        self._data.tell(self._batching)

    def swap(self, dealt: DealtLanes) -> LaneSwap:
        """Let the next iterator of the loader deal out ``dealt``."""
        return LaneSwap(self._data, dealt.deal)

    def _dealt(self, order: Order, ranges: Sequence[Range], *, is_rest: bool) -> DealtLanes:
        deal = self._data.deal(ranges, self._batching)
        return DealtLanes(order=order, deal=deal, rank=self._data.rank, is_rest=is_rest)


class LaneSwap:
    """Ranges that a data set deals out in the place of an epoch."""

    def __init__(self, data: ElasticIterable[Any], deal: LaneDeal) -> None:
        self._data, self._batching = data, deal.batching
        data.tell(deal.batching, deal.ranges)

    def is_taken_by(self, iterator: object) -> bool:
        """Tell whether an iterator of torch has them, so that they need not stay."""
        return self._data.is_asked or getattr(iterator, "_num_workers", 0) > 0

    def back(self) -> None:
        """Let it deal out whole epochs again."""
        self._data.tell(self._batching)


def _saved(data: ElasticIterable[Any], saved: Mapping[str, Any]) -> tuple[Order, LaneDeal]:
    """Return which epoch was dealt out when it was saved, and how.

    Raises:
        InvalidRequestError: it was of other data.
        ManifestError: it says nothing of the kind.
    """
    if "lanes" not in saved:
        raise InvalidRequestError(
            f"the data loader was saved inside an epoch of a data set with a sampler, and has a "
            f"{type(data).__name__} now: finish that epoch as it was"
        )
    try:
        order, lanes = Order(**saved["order"]), saved["lanes"]
        batching = Batching(**{one.name: saved[one.name] for one in fields(Batching)})
        ranges = data.ranges(order.epoch) if lanes is None else list(map(tuple, lanes.tolist()))
        ranks, tail = saved["ranks"], Tail(saved["tail"])
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise ManifestError(f"this does not say how samples were dealt out: {saved}") from cause
    return order, LaneDeal(ranges=ranges, ranks=ranks, tail=tail, batching=batching)
