"""How samples that are read in lanes are dealt out to ranks and their workers. Pure.

A *lane* is read in order and can be begun anywhere: a file, for example. A *range* is a part of
one. What is dealt out is a list of ranges: each rank has a piece of it, all as long, and each of
its workers a part of that piece, in whole batches. So after some batches each reader has used a
part from the beginning of its own, and what is left is a list of ranges again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from holdfast.state.dealing import Tail

Range: TypeAlias = tuple[int, int, int]
"""Number of a lane, first sample, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class LaneDeal:
    """``ranges`` for ``ranks`` ranks that read them with ``workers`` each, at least one."""

    ranges: Sequence[Range]
    ranks: int = 1
    tail: Tail = Tail.REPEAT
    batch_size: int = 1
    drop_last: bool = False
    workers: int = 1

    @cached_property
    def length(self) -> int:
        """How many samples there are."""
        return sum(stop - start for _, start, stop in self.ranges)

    def share(self, rank: int, worker: int) -> list[Range]:
        """Return what one worker of a rank reads, in order."""
        return self._cut(*self._places(rank, worker))

    def count(self, rank: int) -> int:
        """Return how many samples a rank has."""
        begin, end = self._piece(rank)
        return end - begin

    def batches(self, rank: int = 0) -> int:
        """Return how many batches a rank has; rank 0 has the most."""
        count = self.count(rank)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

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
        for turn in range(self.workers):
            worker = (given + turn) % self.workers
            begin, end = self._places(rank, worker)
            taken = -(-max(0, given - worker) // self.workers) * self.batch_size
            yield min(begin + taken, end), min(end, self.length)  # what is repeated is not left

    def _piece(self, rank: int) -> tuple[int, int]:
        """Return where a rank's piece begins and ends; what is behind the end is repeated."""
        each, over = divmod(self.length, self.ranks)
        if self.tail is Tail.UNEVEN:
            begin = rank * each + min(rank, over)
            return begin, begin + each + (rank < over)
        if over and self.tail is Tail.REPEAT:
            each += 1
        return rank * each, (rank + 1) * each

    def _places(self, rank: int, worker: int) -> tuple[int, int]:
        """Return where the part of a worker begins and ends: batches of each in turn, side by side.

        The last batch, which may be smaller, is the last one of the part that has it.
        """
        begin, end = self._piece(rank)
        batches = -(-(end - begin) // self.batch_size)
        counts = [len(range(one, batches, self.workers)) for one in range(self.workers)]
        short = batches * self.batch_size - (end - begin)
        sizes = [count * self.batch_size for count in counts]
        if batches:
            sizes[(batches - 1) % self.workers] -= short
        ends = list(accumulate(sizes, initial=begin))
        return ends[worker], ends[worker + 1]

    def _cut(self, begin: int, end: int) -> list[Range]:
        """Return the ranges between two places of the list, which is repeated at its end."""
        cut: list[Range] = []
        at = 0
        while at < end and self.length:
            for lane, start, stop in self.ranges:
                first, last = max(begin - at, 0), min(end - at, stop - start)
                if first < last:
                    cut.append((lane, start + first, start + last))
                at += stop - start
        return cut
