"""The deals of a loader over an ``ElasticIterable``: joins ``lanes`` and torch's loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.state import rng
from holdfast.state.dealing import Order
from holdfast.state.iterables import ElasticIterable
from holdfast.state.lanes import LaneDeal, Range
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

    def value(self) -> dict[str, object]:
        """Return it as plain data of a state, and a tensor."""
        deal = self.deal
        return {
            "lanes": torch.tensor(deal.ranges, dtype=torch.int64) if self.is_rest else None,
            "order": asdict(self.order),
            "ranks": deal.ranks,
            "rank": self.rank,
            "batch_size": deal.batch_size,
            "drop_last": deal.drop_last,
            "tail": deal.tail.value,
            "workers": deal.workers,
        }

    def after(self, batches: int) -> dict[str, object]:
        """Return what to say beside once each rank was given so many batches."""
        deal = self.deal
        left = deal.length - min(deal.length, batches * deal.batch_size * deal.ranks)
        if batches >= deal.batches():
            left = 0
        return {"given": batches, "used": self.order.length - left}


class LaneDeals:
    """The deals of one loader."""

    is_shared = True
    begins_at_once = True
    """Its iterator asks for samples when it is made, not with the first batch."""

    def __init__(self, loader: DataLoader[Any], data: ElasticIterable[Any]) -> None:
        self._loader, self._data = loader, data
        self._workers = max(1, loader.num_workers)
        data.batched(loader.batch_size or 1, drop_last=loader.drop_last)

    def begun(self, *, alone: bool, made: rng.Stream, first: rng.Stream | None) -> DealtLanes:
        """Return what the newest iterator deals out."""
        del alone, made, first
        return self._dealt(self._data.order, self._data.ranges(self._data.epoch), is_rest=False)

    def read(self, saved: Mapping[str, Any]) -> DealtLanes:
        """Return what was saved, to be dealt out once more by this rank."""
        order, ranges = _saved(self._data, saved)
        return self._dealt(order, ranges, is_rest=saved["lanes"] is not None)

    def rest(self, saved: Mapping[str, Any], *, alone: bool) -> DealtLanes:
        """Return what is to be dealt out here of what was saved.

        Raises:
            InvalidRequestError: the lanes here are others.
        """
        del alone
        order, ranges = _saved(self._data, saved)
        check_order(order, self._data.order)
        deal = LaneDeal(
            ranges=ranges,
            ranks=saved["ranks"],
            tail=type(self._data.tail)(saved["tail"]),
            batch_size=saved["batch_size"],
            drop_last=saved["drop_last"],
            workers=saved["workers"],
        )
        return self._dealt(order, deal.rest(saved["given"]), is_rest=True)

    def is_dealt_anew(self, saved: Mapping[str, Any], here: DealtLanes) -> bool:
        """Tell whether what was saved cannot just be gone on with, or is not to be."""
        value = here.value()
        return self._data.seek or any(saved[name] != value[name] for name in _MAKE)

    def swap(self, dealt: DealtLanes) -> LaneSwap:
        """Let the next iterator of the loader deal out ``dealt``."""
        return LaneSwap(self._data, dealt.deal.ranges)

    def _dealt(self, order: Order, ranges: Sequence[Range], *, is_rest: bool) -> DealtLanes:
        deal = self._data.deal(ranges, workers=self._workers)
        return DealtLanes(order=order, deal=deal, rank=self._data.rank, is_rest=is_rest)


class LaneSwap:
    """Ranges that a data set deals out in the place of an epoch."""

    def __init__(self, data: ElasticIterable[Any], ranges: Sequence[Range]) -> None:
        self._data = data
        data.tell(ranges)

    def is_taken_by(self, iterator: object) -> bool:
        """Tell whether an iterator of torch has them, so that they need not stay."""
        return self._data.is_asked or getattr(iterator, "_num_workers", 0) > 0

    def back(self) -> None:
        """Let it deal out whole epochs again."""
        self._data.tell(None)


def _saved(data: ElasticIterable[Any], saved: Mapping[str, Any]) -> tuple[Order, Sequence[Range]]:
    if "lanes" not in saved:
        raise InvalidRequestError(
            f"the data loader was saved inside an epoch of a data set with a sampler, and has a "
            f"{type(data).__name__} now: finish that epoch as it was"
        )
    try:
        order, lanes = Order(**saved["order"]), saved["lanes"]
    except TypeError as cause:
        raise ManifestError(f"this does not say how samples were dealt out: {saved}") from cause
    if lanes is None:
        return order, data.ranges(order.epoch)
    return order, [(lane, start, stop) for lane, start, stop in lanes.tolist()]
