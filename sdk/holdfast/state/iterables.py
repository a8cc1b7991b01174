"""An iterable data set whose epochs can go on with another number of ranks, or of workers."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.errors import InvalidRequestError
from holdfast.state.dealing import Order, Tail
from holdfast.state.lanes import Batching, LaneDeal, Range
from holdfast.state.samplers import checked_seed, ranks_here

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class _Told:
    """What the loader has told: slots, so that it is taken for nothing that changes.

    ``rest``: what the next iterator deals out; None: a whole epoch.
    """

    batching: Batching = field(default_factory=Batching)
    rest: Sequence[Range] | None = None
    is_asked: bool = False


class ElasticIterable(IterableDataset[T_co]):
    """Deals samples that are read in lanes, such as files, out to ranks and their workers.

    In a captured loader another number of ranks, or of workers, goes on inside an epoch with what
    these have not used. Derive a class from it that says how a lane is read, ``lane``, and leave
    ``__iter__`` to it.

    Args:
        lengths: How many samples each lane has; the same on all ranks. Lanes may be of any length,
            and fewer than there are ranks: a lane is read by several, each a part of it.
        num_replicas: How many ranks share an epoch; None takes the process group's, or 1 without.
        rank: Which of them this is; None takes the process group's.
        shuffle: Permute the lanes in each epoch, by seed and epoch.
        seed: The same on all ranks.
        drop_last: Leave samples out that cannot be dealt out equally, fewer than there are ranks;
            else as many of the first ones are repeated.
        even: False repeats and leaves out none: some ranks have one sample more, perhaps one batch.
            Several ranks then need ``set_epoch`` before each pass, with a number of its own.
        seek: After a restart on the same ranks, go on behind what was used without reading it once
            more. What is drawn at random, by ``lane`` or in workers, is then not the same.

    Raises:
        PreconditionError: there are several ranks, and no process group yet.
        InvalidRequestError: ``rank`` is none of ``num_replicas``, a length is none, or ``seed`` is
            no whole number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        even: bool = True,
        seek: bool = False,
    ) -> None:
        self.num_replicas, self.rank = ranks_here(num_replicas, rank)
        self.lengths = _checked(lengths)
        if drop_last and not even:
            raise InvalidRequestError(
                "drop_last=True leaves samples out so that ranks have equally many, and even=False "
                "has them differ: choose one"
            )
        self.shuffle, self.seed, self.epoch = shuffle, checked_seed(seed), 0
        self.drop_last, self.even, self.seek = drop_last, even, seek
        self._told = _Told()

    @abstractmethod
    def lane(self, number: int, start: int, stop: int) -> Iterator[T_co]:
        """Yield the samples ``start`` to ``stop - 1`` of a lane.

        It is called in the process that reads: in a worker, if the loader has some.
        """

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be of ``epoch``; without that all are in one order."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return how many samples this rank has in a whole epoch."""
        return self.deal(self.ranges(self.epoch), Batching()).count(self.rank)

    def __iter__(self) -> Iterator[T_co]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rest, self._told.is_asked = self._told.rest, True
        ranges = self.ranges(self.epoch) if rest is None else rest
        deal = self.deal(ranges, replace(self._told.batching, workers=workers))
        return self._read(deal.share(self.rank, number))

    def _read(self, share: Sequence[Range]) -> Iterator[T_co]:
        for number, start, stop in share:
            at = start
            for sample in self.lane(number, start, stop):
                at += 1
                if at > stop:
                    break
                yield sample
            if at != stop:
                raise InvalidRequestError(
                    f"lane({number}, {start}, {stop}) of {type(self).__name__} gave "
                    f"{'more' if at > stop else at - start} samples, and {stop - start} are to "
                    f"come: by lengths= the lane has {self.lengths[number]}"
                )

    def ranges(self, epoch: int) -> list[Range]:
        """Return what is dealt out in a whole epoch: all lanes, in its order."""
        numbers: Sequence[int] = range(len(self.lengths))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            numbers = torch.randperm(len(self.lengths), generator=generator).tolist()
        return [(number, 0, self.lengths[number]) for number in numbers]

    def deal(self, ranges: Sequence[Range], batching: Batching) -> LaneDeal:
        """Return how ``ranges`` are dealt out to the ranks that there are."""
        return LaneDeal(ranges=ranges, ranks=self.num_replicas, tail=self.tail, batching=batching)

    @property
    def tail(self) -> Tail:
        """What becomes of samples that cannot be dealt out equally."""
        if not self.even:
            return Tail.UNEVEN
        return Tail.DROP if self.drop_last else Tail.REPEAT

    @property
    def order(self) -> Order:
        """What an epoch depends on: nothing that changes with ranks."""
        digest = hashlib.blake2b(repr(self.lengths).encode(), digest_size=8).hexdigest()
        return Order(
            of=f"lanes {digest}",
            length=sum(self.lengths),
            seed=self.seed,
            shuffle=self.shuffle,
            epoch=self.epoch,
        )

    @property
    def is_asked(self) -> bool:
        """Whether an iterator was made in this process since it was told what to deal out."""
        return self._told.is_asked

    def tell(self, batching: Batching, rest: Sequence[Range] | None = None) -> None:
        """Have the next iterator deal out ``rest``, as its loader reads; None: a whole epoch."""
        self._told = _Told(batching, rest)


def is_elastic(data: object) -> TypeGuard[ElasticIterable[Any]]:
    """Tell whether an iterable data set is dealt out in lanes, by no ``__iter__`` of its own."""
    return isinstance(data, ElasticIterable) and type(data).__iter__ is ElasticIterable.__iter__


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of lanes.

    Raises:
        InvalidRequestError: one is no number of samples.
    """
    try:
        held = tuple(lengths)
        wrong = [length for length in held if not 0 <= length == int(length)]
    except (TypeError, ValueError, OverflowError) as cause:
        raise InvalidRequestError(
            f"lengths= has the number of samples of each lane, such as [1000, 850]; this has "
            f"something else: {cause}"
        ) from cause
    if wrong:
        raise InvalidRequestError(f"lengths= has {wrong[0]}: a lane has 0 samples or more")
    return tuple(map(int, held))
