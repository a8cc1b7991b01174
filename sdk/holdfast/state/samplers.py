"""A sampler whose epochs can go on with another number of ranks."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state.dealing import Deal, Order, Tail


@dataclass(slots=True)
class _Place:
    """Where the next pass begins, and where the present one is: places of the order.

    Slots, so that what looks for values that a sampler remembers passes over it.
    """

    next_begin: int = 0
    begin: int = 0
    given: int = 0
    live: bool = False


class ElasticSampler(DistributedSampler[int]):
    """Deals an epoch out to ranks; another number of them goes on where these have stopped.

    The order is that of torch's ``DistributedSampler``: of (seed, epoch) and the length alone. In
    a captured loader it goes on by itself, with workers and prefetching; as part of a pipeline of
    ``torchdata.nodes`` by its own ``state_dict``. An epoch that is begun without ``set_epoch``
    is the one after the last.

    Args:
        dataset: Only its length is used.
        num_replicas: How many ranks share an epoch; None takes the process group's, or 1 without.
        rank: Which of them this is; None takes the process group's.
        shuffle: Permute the order of each epoch.
        seed: The same on all ranks.
        drop_last: Leave samples out that cannot be dealt out equally, fewer than there are ranks;
            else as many of the first ones are repeated.
        even: False repeats and leaves out none: some ranks have one sample more, perhaps one batch.
            Several ranks then need ``set_epoch`` before each pass, with a number of its own.

    Raises:
        PreconditionError: there are several ranks, and no process group yet.
        InvalidRequestError: ``rank`` is none of ``num_replicas``, or ``seed`` is no whole number.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: bool = True,
    ) -> None:
        ranks, own = ranks_here(num_replicas, rank)
        super().__init__(cast("Any", dataset), ranks, own, shuffle, checked_seed(seed), drop_last)
        if drop_last and not even:
            raise InvalidRequestError(
                "drop_last=True leaves samples out so that ranks have equally many, and even=False "
                "has them differ: choose one"
            )
        self.even = even
        self._begun = False
        self._place = _Place()

    def order(self, epoch: int) -> Sequence[int] | torch.Tensor:
        """Return all samples of ``epoch`` in their order, the same on all ranks.

        A subclass may have another one, of as many samples as ``dataset`` has: with weights, for
        example. It must depend on nothing but ``epoch`` and what all ranks have alike.
        """
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)

    @property
    def length(self) -> int:
        """How many samples an epoch has, over all ranks."""
        return len(cast("Sized", self.dataset))

    @property
    def tail(self) -> Tail:
        """What becomes of samples that cannot be dealt out equally."""
        return tail_of(self)

    def set_epoch(self, epoch: int, index: int = 0) -> None:
        """Have the next pass be of ``epoch``, and begin after ``index`` samples of all ranks."""
        self.epoch = epoch
        self._begun = False
        self._place = _Place(next_begin=index)

    @property
    def has_begun(self) -> bool:
        """Whether a pass has begun since ``set_epoch``."""
        return self._begun

    @property
    def begun_at(self) -> int:
        """How many samples of all ranks were used before the present pass, or else the next."""
        return self._place.begin if self._place.live else self._place.next_begin

    def __len__(self) -> int:
        """Return how many samples this rank has in a whole epoch."""
        return len(self._deal(0).places(self.rank))

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            self.epoch += 1
        self._begun = True
        self._place = place = _Place(begin=self._place.next_begin, live=True)
        places = self._deal(place.begin).places(self.rank)
        for sample in _picked(self.order(self.epoch), places, self.length):
            place.given += 1
            yield sample
        place.live = False

    def _deal(self, begin: int) -> Deal:
        return Deal(length=self.length, begin=begin, ranks=self.num_replicas, tail=self.tail)

    def state_dict(self) -> dict[str, object]:
        """Return what all ranks have been given of the epoch, if each was given as many.

        It is the same on all ranks, and any number of them can go on from it. It counts what was
        asked for: with workers, put the loader into a state, not the sampler.
        """
        place = self._place
        index = min(self.length, place.begin + place.given * self.num_replicas)
        return {
            "order": asdict(order_of(self)),
            "begun": self._begun,
            "index": index if place.live else place.next_begin,
            "live": place.live,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next pass be the rest of the one that was saved.

        Raises:
            InvalidRequestError: it was saved inside an epoch of another order; says how it differs.
        """
        live, index, order = bool(state["live"]), int(state["index"]), Order(**state["order"])
        if index:  # also of one that was loaded itself, and its rest not yet begun
            check_order(order, order_of(self))
        self.epoch = order.epoch
        self._begun = bool(state["begun"]) and not live
        self._place = _Place(next_begin=index)


def rest_of(sampler: DistributedSampler[int], epoch: int, begin: int) -> ElasticSampler:
    """Return a sampler of the rest of an epoch from ``begin`` on, for the rank of ``sampler``."""
    if isinstance(sampler, ElasticSampler):
        rest = copy.copy(sampler)
    else:
        rest = ElasticSampler(
            cast("Sized", sampler.dataset),
            sampler.num_replicas,
            sampler.rank,
            sampler.shuffle,
            sampler.seed,
            sampler.drop_last,
        )
    rest.set_epoch(epoch, begin)
    return rest


def order_of(sampler: DistributedSampler[int]) -> Order:
    """Return what the order of the epoch depends on that a sampler has begun, or begins next."""
    own = isinstance(sampler, ElasticSampler) and type(sampler).order is not ElasticSampler.order
    return Order(
        of=type(sampler).__qualname__ if own else "",
        length=len(cast("Sized", sampler.dataset)),
        seed=sampler.seed,
        shuffle=sampler.shuffle,
        epoch=sampler.epoch,
    )


def tail_of(sampler: DistributedSampler[int]) -> Tail:
    """Return what becomes of samples that cannot be dealt out equally."""
    if isinstance(sampler, ElasticSampler) and not sampler.even:
        return Tail.UNEVEN
    return Tail.DROP if sampler.drop_last else Tail.REPEAT


def check_order(saved: Order, here: Order) -> None:
    """Refuse to go on inside an epoch whose order is another one here.

    Raises:
        InvalidRequestError: says what differs.
    """
    if saved.length != here.length:
        raise InvalidRequestError(
            f"the data loader was saved inside an epoch of {saved.length} samples, and its data "
            f"set has {here.length} now: finish that epoch with the same data, then change them"
        )
    for name in ("of", "seed", "shuffle"):
        before, now = getattr(saved, name), getattr(here, name)
        if before != now:
            what = f"{name}="
            if name == "of":
                what, before, now = "the order of ", before or "torch", now or "torch"
            raise InvalidRequestError(
                f"the data loader was saved inside an epoch with {what}{before}, but has "
                f"{what}{now} now: finish that epoch as it was, then change it"
            )


def _picked(order: Sequence[int] | torch.Tensor, places: range, length: int) -> list[int]:
    """Return what is at ``places`` of an order, which is repeated at its end."""
    if len(order) != length:
        raise InvalidRequestError(
            f"order() gave {len(order)} samples, and the data set has {length}: give as many"
        )
    inside = order[places.start : places.stop : places.step]
    picked = inside.tolist() if isinstance(inside, torch.Tensor) else list(inside)
    return picked + [int(order[at % length]) for at in places[len(picked) :]]


def checked_seed(seed: object) -> int:
    """Return a seed of an order; numbers of NumPy's are some too.

    Raises:
        InvalidRequestError: it is no whole number.
    """
    try:
        return operator.index(cast("SupportsIndex", seed))
    except TypeError:
        raise InvalidRequestError(f"seed={seed!r} is no whole number") from None


def ranks_here(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return how many ranks share an epoch, and which this is; None: as the process group says.

    Raises:
        PreconditionError: there are several ranks, and no process group yet.
        InvalidRequestError: ``rank`` is none of ``num_replicas``.
    """
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise PreconditionError(
                "there are several ranks and no process group yet: make it after "
                "init_process_group(), or pass num_replicas= and rank="
            )
    ranks, own = num_replicas or 1, rank or 0
    if not 0 <= own < ranks:
        raise InvalidRequestError(f"rank={own} is none of num_replicas={ranks}: they count from 0")
    return ranks, own
