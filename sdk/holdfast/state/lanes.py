"""How samples that are read in lanes are dealt out to ranks and their workers. Pure.

A *lane* is read in order and can be begun anywhere: a file, for example. A *range* is a part of
one. What is dealt out is a list of ranges: each rank has a piece of it, and each of its workers a
part of that piece, in whole batches. So after some batches each reader has used a part from the
beginning of its own, and what is left is a list of ranges again. A piece that is a sample shorter
than others ends with one that is repeated, in its last batch: until then none came twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from holdfast.state.dealing import Tail

Range: TypeAlias = tuple[int, int, int]
"""Number of a lane, first sample, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How a rank reads: with how many workers, at least one, in batches of which size."""

    batch_size: int = 1
    drop_last: bool = False
    workers: int = 1

    def batches(self, samples: int) -> int:
        """Return how many batches are made of so many samples."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


@dataclass(frozen=True, kw_only=True)
class LaneDeal:
    """``ranges`` for ``ranks`` ranks, all of which read them alike."""

    ranges: Sequence[Range]
    ranks: int = 1
    tail: Tail = Tail.REPEAT
    batching: Batching = Batching()

    @cached_property
    def length(self) -> int:
        """How many samples there are."""
        return self._begins[-1]

    def share(self, rank: int, worker: int) -> list[Range]:
        """Return what one worker of a rank reads, in order."""
        share = self._cut(*self._places(rank, worker))
        if self._is_filled(rank) and worker == self._last_worker(rank):
            repeated = (rank - self.length % self.ranks) % self.length
            share += self._cut(repeated, repeated + 1)
        return share

    def count(self, rank: int) -> int:
        """Return how many samples a rank has."""
        begin, end = self._piece(rank)
        return end - begin + self._is_filled(rank)

    def batches(self, rank: int = 0) -> int:
        """Return how many batches a rank has; rank 0 has the most."""
        return self.batching.batches(self.count(rank))

    def rest(self, given: int) -> list[Range]:
        """Return what is left once each rank was given so many batches; nothing after the last.

        The worker whose batch is next comes first: dealt out to as many readers it is read alike.
        """
        if given >= self.batches():
            return []
        left = [place for rank in range(self.ranks) for place in self._left(rank, given)]
        last = self._piece(self.ranks - 1)[1]
        return [one for begin, end in [*left, (last, self.length)] for one in self._cut(begin, end)]

    def _left(self, rank: int, given: int) -> Iterator[tuple[int, int]]:
        size, workers = self.batching.batch_size, self.batching.workers
        for turn in range(workers):
            worker = (given + turn) % workers
            begin, end = self._places(rank, worker)
            yield begin - (worker - given) // workers * size, end  # nothing, if that is behind it

    def _piece(self, rank: int) -> tuple[int, int]:
        """Return where a rank's piece begins and ends."""
        each, over = divmod(self.length, self.ranks)
        if self.tail is Tail.DROP:
            over = 0
        begin = rank * each + min(rank, over)
        return begin, begin + each + (rank < over)

    def _is_filled(self, rank: int) -> bool:
        """Tell whether a rank's piece is one shorter than others, so that one is repeated in it."""
        return self.tail is Tail.REPEAT and 0 < self.length % self.ranks <= rank

    def _last_worker(self, rank: int) -> int:
        """Return which worker of a rank has its last batch."""
        batches = -(-self.count(rank) // self.batching.batch_size)
        return (batches - 1) % self.batching.workers

    def _places(self, rank: int, worker: int) -> tuple[int, int]:
        """Return where the part of a worker begins and ends: batches of each in turn, side by side.

        The last batch, which may be smaller, is the last one of the part that has it.
        """
        begin, end = self._piece(rank)
        size, workers = self.batching.batch_size, self.batching.workers
        batches = -(-self.count(rank) // size)
        sizes = [len(range(one, batches, workers)) * size for one in range(workers)]
        sizes[self._last_worker(rank)] -= batches * size - (end - begin)
        ends = list(accumulate(sizes, initial=begin))
        return ends[worker], ends[worker + 1]

    @cached_property
    def _begins(self) -> list[int]:
        """At which place of the list each range begins; then where the last one ends."""
        sizes = (stop - start for _, start, stop in self.ranges)
        return list(accumulate(sizes, initial=0))

    def _cut(self, begin: int, end: int) -> list[Range]:
        """Return the ranges between two places of the list."""
        cut: list[Range] = []
        while begin < end:
            number = bisect_right(self._begins, begin) - 1
            lane, start, stop = self.ranges[number]
            first = start + begin - self._begins[number]
            last = min(stop, first + end - begin)
            cut.append((lane, first, last))
            begin += last - first
        return cut
