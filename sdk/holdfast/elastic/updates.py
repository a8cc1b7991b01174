"""Which samples of a pass go into which update, and into which micro-batch of which rank.

An *update* is one step of the optimizer: samples of all ranks, on each in one micro-batch or
several. A pass is a sequence of updates that together have each of its samples once. Pure; samples
are places of the pass's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How large updates are: samples of all ranks, and micro-batches on each rank.

    Raises:
        InvalidRequestError: a rank would have a micro-batch without a sample.
    """

    size: int
    replicas: int
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if not (self.micro_batches >= 1 and self.replicas >= 1):
            raise InvalidRequestError(f"an update needs ranks and micro-batches: {self}")
        if self.size < self.replicas * self.micro_batches:
            each = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            raise InvalidRequestError(
                f"a batch of {self.size} cannot be divided among {self.replicas} ranks{each}: each "
                f"needs a sample"
            )

    @property
    def local(self) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.size // (self.replicas * self.micro_batches))

    @property
    def gradients_count(self) -> float:
        """How many equal shares of an update would be as noisy as those of the ranks are.

        The number of ranks, and a little more where some have a sample less.

        >>> Batching(size=4, replicas=3).gradients_count
        3.3333333333333335
        """
        shares = split(self.size, self.replicas)
        return self.size * sum(1 / share for share in shares) / self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One micro-batch: places ``begin`` to ``end`` of the order, of the update that has ``of``.

    ``index`` of ``count`` on this rank. ``samples`` are those of this rank in the whole update;
    ``spare``: it has none, and does again what another one does, which does not count.
    """

    begin: int
    end: int
    of: range
    index: int
    count: int
    samples: int
    spare: bool = False

    @property
    def last(self) -> bool:
        """Whether the update is complete with it."""
        return self.index == self.count - 1


def split(count: int, parts: int) -> list[int]:
    """Return ``count`` as a sum of ``parts`` numbers that differ by 1 at most, larger ones first.

    >>> split(7, 3)
    [3, 2, 2]
    """
    each, rest = divmod(count, parts)
    return [each + 1] * rest + [each] * (parts - rest)


def updates(begin: int, length: int, batching: Batching) -> Iterator[range]:
    """Yield the places of each update from ``begin`` on; the last one ends at ``length``.

    What is left over is an update of its own if it is at least half of one, else it joins the last:
    no micro-batch of a pass is much smaller than half of the others.
    """
    while begin < length:
        end = begin + batching.size
        if length - end < _least(batching):
            end = length
        yield range(begin, end)
        begin = end


def micro_batches(update: range, rank: int, batching: Batching) -> Iterator[Micro]:
    """Yield what ``rank`` does of an update: micro-batches of at most ``batching.local`` samples.

    As many on each rank: a forward may be a collective, too. So where micro-batches have one sample
    each and shares differ, one of them has two.
    """
    shares = split(len(update), batching.replicas)
    at, samples = update.start + sum(shares[:rank]), shares[rank]
    spare = not samples
    if spare:
        at, samples = update.start, 1
    count = _count(len(update), batching)
    for index, size in enumerate(split(samples, count)):
        yield Micro(
            begin=at, end=at + size, of=update, index=index, count=count,
            samples=0 if spare else samples, spare=spare,
        )  # fmt: skip
        at += size


def micro_batches_count(begin: int, length: int, batching: Batching) -> int:
    """Return how many micro-batches each rank does from ``begin`` on."""
    whole, rest = divmod(max(0, length - begin), batching.size)
    if not rest:
        return whole * _count(batching.size, batching)
    joined = rest < _least(batching) and whole > 0
    last = rest + batching.size * joined
    return (whole - joined) * _count(batching.size, batching) + _count(last, batching)


def _least(batching: Batching) -> float:
    """Return how many samples are an update of their own."""
    return max(batching.replicas, batching.size / 2)


def _count(samples: int, batching: Batching) -> int:
    """Return in how many micro-batches each rank does an update of so many samples."""
    shares = split(samples, batching.replicas)
    return max(1, min(-(-shares[0] // batching.local), shares[-1]))
