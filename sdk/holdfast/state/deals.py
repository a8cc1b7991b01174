"""Which data loaders' epochs can be dealt out anew, and how: joins ``dealing`` and torch's loaders.

A loader says what it deals out by its sampler. Where that shares an order with other ranks, or
there is one rank, the rest of an epoch that any number of ranks have begun can be dealt out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state import rng
from holdfast.state.dealing import Dealt, Order, Tail
from holdfast.state.iterables import ElasticIterable, is_elastic
from holdfast.state.lane_deals import DealtLanes, LaneDeals
from holdfast.state.loader_makes import is_torchdatas
from holdfast.state.samplers import ElasticSampler, check_order, order_of, rest_of, tail_of

Dealing: TypeAlias = Dealt | DealtLanes
"""What an iterator deals out."""


class Swap(Protocol):
    """Something that stands in the place of a loader's own, until its next iterator has it."""

    def is_taken_by(self, iterator: object) -> bool:
        """Tell whether an iterator has it, so that it need not stay."""

    def back(self) -> None:
        """Put the loader's own back."""


class Deals(Protocol):
    """How the epochs of a loader are dealt out."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks share the order."""

    @property
    def begins_at_once(self) -> bool:
        """Whether its iterator asks for samples when it is made, not with the first batch."""

    @property
    def uneven_epoch(self) -> int | None:
        """The epoch of the next pass, if ranks may have unequally many batches in it; else None."""

    def begun(self, *, alone: bool, made: rng.Stream, first: rng.Stream | None) -> Dealing | None:
        """Return what the newest iterator deals out; None: its order is not known."""

    def read(self, saved: Mapping[str, Any]) -> Dealing:
        """Return what was saved."""

    def rest(self, saved: Mapping[str, Any], *, alone: bool) -> Dealing:
        """Return what is to be dealt out here of what was saved."""

    def nothing(self, order: Order) -> Dealing:
        """Return what is to be dealt out of an epoch that other ranks are about to end."""

    def is_dealt_anew(self, saved: Mapping[str, Any], here: Any) -> bool:
        """Tell whether what was saved cannot just be gone on with."""

    def prepare(self) -> None:
        """Make ready for a pass over a whole epoch; to be called before its iterator is made."""

    def swap(self, dealt: Any) -> Swap:
        """Let the next iterator of the loader deal out ``dealt``, not what its own parts say."""


ALONE = "one rank"
"""Of an order: that of torch's own samplers on a single rank, with the seed that was drawn."""


class SamplerDeals:
    """The deals of a loader whose sampler ranks share, or gives each sample once.

    ``alone``: there is one rank.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._sampler, self._batches = _samplers(loader)
        self._shared = self._sampler if _is_shared(self._sampler) else None

    @property
    def is_shared(self) -> bool:
        """Whether ranks share the order of the sampler."""
        return self._shared is not None

    @property
    def uneven_epoch(self) -> int | None:
        """The epoch of the next pass, if ranks may have unequally many batches in it; else None."""
        sampler = self._shared
        if sampler is None or sampler.num_replicas == 1 or tail_of(sampler) is not Tail.UNEVEN:
            return None
        return int(sampler.epoch)

    def begun(self, *, alone: bool, made: rng.Stream, first: rng.Stream | None) -> Dealt | None:
        """Return what the newest iterator deals out; None: its order is not known.

        To be asked when its first batch is on its way, and before the next iterator is made.
        ``made`` and ``first`` are the streams before it was made and before its first batch.
        """
        sampler = self._shared
        if sampler is not None:
            begin = sampler.begun_at if isinstance(sampler, ElasticSampler) else 0
            return self._dealt(order_of(sampler), begin)
        if not alone:
            return None
        seed: int | None = 0
        is_random = type(self._sampler) is RandomSampler
        if is_random:
            seed = self._drawn_seed(made, first)
        elif type(self._sampler) is not SequentialSampler:
            return None
        if seed is None:
            return None
        length = len(self._sampler)
        return self._dealt(Order(of=ALONE, length=length, seed=seed, shuffle=is_random, epoch=0), 0)

    def _drawn_seed(self, made: rng.Stream, first: rng.Stream | None) -> int | None:
        """Return the seed that a ``RandomSampler`` has drawn for its permutation.

        Making the iterator draws the base seed of workers. The sampler draws when it is asked for
        the first index: at once if there are workers, else with the first batch.
        """
        loader, generator = self._loader, torch.Generator()
        at = made if loader.num_workers else first
        if self._sampler.generator is not None or at is None:
            return None
        generator.set_state(cast("torch.Tensor", at["torch"]))
        if loader.num_workers and loader.generator is None:
            _draw(generator)
        return _draw(generator)

    @property
    def begins_at_once(self) -> bool:
        """Whether its iterator asks for indices when it is made, not with the first batch."""
        return bool(self._loader.num_workers)

    def read(self, saved: Mapping[str, Any]) -> Dealt:
        """Return what was saved."""
        return Dealt.of(saved)

    def rest(self, value: Mapping[str, Any], *, alone: bool) -> Dealt:
        """Return what is to be dealt out here of what was saved.

        Raises:
            InvalidRequestError: the order here is another one, or not known.
        """
        if "lanes" in value:
            raise InvalidRequestError(not_shared(self._loader, value["ranks"]))
        saved = Dealt.of(value)
        by_torch = saved.order.of in ("", ALONE)
        if self._shared is not None and saved.order.of == ALONE:
            here = replace(saved.order, length=order_of(self._shared).length)
        elif self._shared is not None:
            here = order_of(self._shared)
        elif alone and by_torch:  # and its sampler gives each sample once
            here = replace(saved.order, length=len(self._sampler))
        else:
            raise InvalidRequestError(not_shared(self._loader, saved.ranks))
        check_order(saved.order, here)
        return self._dealt(saved.order, saved.used)

    def nothing(self, order: Order) -> Dealt:
        """Return what is to be dealt out of an epoch that other ranks are about to end.

        Raises:
            InvalidRequestError: the order here is another one.
        """
        assert self._shared is not None
        check_order(order, order_of(self._shared))
        return self._dealt(order, order.length)

    def is_dealt_anew(self, saved: Mapping[str, Any], here: Dealt) -> bool:
        """Tell whether what was saved cannot just be gone on with."""
        value = here.value()
        return any(saved[name] != value[name] for name in _MAKE)

    def prepare(self) -> None:
        """Do nothing: a sampler is of one loader."""

    def swap(self, dealt: Dealt) -> SamplerSwap:
        """Let the next iterator of the loader deal out ``dealt``, and not what its sampler says.

        It is to be swapped back when its first batch is there: some ask for it that late.
        """
        rest = self._rest(dealt)
        if self._batches is None:
            return SamplerSwap(self._loader, "sampler", rest, rest)
        batches = type(self._batches)(rest, dealt.batch_size, dealt.drop_last)
        return SamplerSwap(self._loader, "batch_sampler", batches, rest)

    def _rest(self, dealt: Dealt) -> ElasticSampler:
        order, shared = dealt.order, self._shared
        if shared is not None and order.of != ALONE:
            return rest_of(shared, order.epoch, dealt.begin)
        drop, even = dealt.tail is Tail.DROP, dealt.tail is not Tail.UNEVEN
        rest = ElasticSampler(
            range(order.length), dealt.ranks, dealt.rank, order.shuffle, order.seed, drop, even=even
        )
        rest.set_epoch(order.epoch, dealt.begin)
        return rest

    def _dealt(self, order: Order, begin: int) -> Dealt:
        sampler, batches = self._shared, self._batches
        return Dealt(
            order=order,
            begin=begin,
            used=begin,
            ranks=1 if sampler is None else sampler.num_replicas,
            rank=0 if sampler is None else sampler.rank,
            batch_size=1 if batches is None else batches.batch_size,
            drop_last=batches is not None and batches.drop_last,
            tail=Tail.REPEAT if sampler is None else tail_of(sampler),
            sampler=type(self._sampler).__name__,
        )


class SamplerSwap:
    """A part of a loader that stands in the place of its own."""

    def __init__(
        self, loader: DataLoader[Any], name: str, part: object, rest: ElasticSampler
    ) -> None:
        self._loader, self._name, self._part, self._rest = loader, name, part, rest
        self._own = vars(loader)[name]
        self._is_taken = False
        vars(loader)[name] = part  # the loader itself refuses a change

    def is_taken_by(self, iterator: object) -> bool:
        """Tell whether an iterator of torch has it, so that it need not stay."""
        self._is_taken = getattr(iterator, "_index_sampler", None) is self._part
        return self._is_taken

    def back(self) -> None:
        """Put its own part back.

        Raises:
            PreconditionError: nobody has asked the other one for anything.
        """
        vars(self._loader)[self._name] = self._own
        if not (self._is_taken or self._rest.has_begun):
            raise PreconditionError(
                f"what is left of the epoch was not asked for: {type(self._loader).__name__} "
                f"makes its batches in a way of its own; finish that epoch on as many ranks"
            )


def deals_of(loader: DataLoader[Any]) -> Deals | None:
    """Return how the epochs of a loader are dealt out; None: only its own code knows."""
    if is_elastic(loader.dataset):
        return LaneDeals(loader, loader.dataset)
    sampler, _ = _samplers(loader)
    return SamplerDeals(loader) if _is_shared(sampler) or _is_whole(sampler) else None


def check_agreed(path: str, trees: Mapping[int, Any]) -> None:
    """Refuse an epoch of which ranks had used unequally much when the checkpoint was taken.

    Args:
        path: Of the data loader.
        trees: What each rank has saved of it, as far as that is here.

    Raises:
        InvalidRequestError: names two ranks.
    """
    told = {rank: _used(tree) for rank, tree in trees.items()}
    first = next(iter(told), 0)
    for rank, used in told.items():
        if used != told[first]:
            raise InvalidRequestError(
                f"data loader {path!r}: rank {first} had used {told[first]} and rank {rank} "
                f"{used}, so what is left cannot be dealt out to another number of ranks: take "
                f"as many batches on each rank, or restore on as many ranks as had saved",
                key=path,
            )


def _used(tree: Mapping[str, Any]) -> str:
    """Return as text what of its epoch a rank says that all have used."""
    over, dealt = tree.get("over"), tree.get("dealt")
    if dealt:
        return f"{dealt['used']} samples of epoch {dealt['order']['epoch']}"
    if over:
        return f"{over['order']['length']} samples of epoch {over['order']['epoch']}"
    return "no epoch that it shares"


def not_named(epoch: int) -> str:
    """Say that an epoch has ended that is begun once more, where ranks end it one by one."""
    return (
        f"epoch {epoch} of a data loader with even=False has ended, and is begun once more: call "
        f"set_epoch(epoch), of its sampler or data set, before each pass, with another number; "
        f"ranks may end an epoch in unequal steps, and only its number tells a restart whether "
        f"they all have"
    )


def not_shared(loader: DataLoader[Any], saved_ranks: int) -> str:
    """Say that a loader cannot take its share of an epoch that ranks shared."""
    return (
        f"the data loader was saved inside an epoch that {saved_ranks} ranks share, and has "
        f"{_named(loader)} now, which does not: finish that epoch as it was, or {_advice(loader)}"
    )


def not_known(saved_ranks: int) -> str:
    """Say that the order of an epoch that was begun without sharing cannot be shared now."""
    return (
        f"the data loader was saved inside an epoch whose order only its sampler knew, on "
        f"{saved_ranks} ranks, and has one now that ranks share: finish that epoch as it was, and "
        f"use holdfast.ElasticSampler(dataset) on any number of ranks, also on one"
    )


def told(loader: DataLoader[Any], saved_ranks: int, ranks: int) -> str:
    """Say that samples may be used twice or not at all, and what to do about it."""
    return (
        f"a data loader was saved inside an epoch by {saved_ranks} ranks, and now there are "
        f"{ranks}: {_named(loader)} does not say how they share it, so in this epoch samples may "
        f"be used twice or not at all; {_advice(loader)}"
    )


def _named(loader: DataLoader[Any]) -> str:
    if isinstance(loader.dataset, IterableDataset):
        return f"its iterable data set, {type(loader.dataset).__name__},"
    sampler, _ = _samplers(loader)
    return f"a {type(loader.batch_sampler if sampler is None else sampler).__name__}"


def _advice(loader: DataLoader[Any]) -> str:
    if isinstance(loader.dataset, IterableDataset):
        if isinstance(loader.dataset, ElasticIterable):
            return "leave its __iter__ to holdfast.ElasticIterable"
        return "make it a holdfast.ElasticIterable"
    return (
        "deal it out with\n    sampler = holdfast.ElasticSampler(dataset)\n"
        "    loader = DataLoader(dataset, batch_size, sampler=sampler)"
    )


_MAKE = ("ranks", "rank", "batch_size", "drop_last", "tail", "sampler")


def _samplers(loader: DataLoader[Any]) -> tuple[Any, BatchSampler | None]:
    """Return what gives the indices of a loader, and what makes batches of them, if torch does."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, None
    if type(batches) is BatchSampler or is_torchdatas(batches, "BatchSampler"):
        return batches.sampler, batches
    return None, None


def _is_shared(sampler: object) -> bool:
    """Tell whether ranks share the order of a sampler, and it is known."""
    if isinstance(sampler, ElasticSampler):
        return type(sampler).__iter__ is ElasticSampler.__iter__
    known = type(sampler) is DistributedSampler
    return known or is_torchdatas(sampler, "StatefulDistributedSampler")


def _is_whole(sampler: Any) -> bool:
    """Tell whether a sampler gives all samples, each once."""
    if type(sampler) is SequentialSampler:
        return True
    random = type(sampler) is RandomSampler or is_torchdatas(sampler, "RandomSampler")
    if not random or sampler.replacement:
        return False
    return bool(sampler.num_samples == len(sampler.data_source))


def _draw(generator: torch.Generator) -> int:
    """Draw a seed as torch's loaders and samplers do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
