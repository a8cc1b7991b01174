"""What a restore owes its targets, done at once by as many threads as there are cores.

A restore of one gigabyte is bound by page faults and by one core's memcpy; both halve on two cores.
What is read from a file takes no fault on its side: 0.15 s of CPU a GiB, where a copy from a fresh
mapping of a tmpfs takes 0.20 s with the end of the mapping. Knows nothing of names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from holdfast.copying.batches import Pair, batches
from holdfast.threads import limit_this_thread

BATCH_BYTES_MAX = 16 << 20
THREADS_COUNT_MAX = 16

Fill = Callable[[int, memoryview], None]
"""Fills memory with the bytes of a file from a place on; any thread may call it."""


class _Read(NamedTuple):
    fill: Fill
    begin: int
    memory: memoryview


class Transfer:
    """Targets with what fills them: a source of equal shape, or bytes of a file."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._reads: list[_Read] = []
        self._read: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Owe a copy; both must stay as they are until ``run`` has returned."""
        self._pairs.append(as_in_memory(target.detach(), source))

    def read(self, target: torch.Tensor, fill: Fill, begin: int) -> bool:
        """Owe that ``fill`` fills the memory of ``target`` with bytes from ``begin`` on.

        Returns:
            Whether it will: only that of a plain tensor whose elements lie in one row on the CPU.
        """
        if not _is_in_one_row(target):
            return False
        # Not view(-1): of one element the strides may be anything.
        row = target.as_strided((target.numel(),), (1,))
        memory = row.view(torch.uint8).numpy().data
        self._reads.append(_Read(fill, begin, memory))
        self._read.append(target)
        return True

    def run(self) -> None:
        """Do all that is owed.

        Raises:
            CheckpointError: as ``fill`` says; targets hold anything.
        """
        pairs = batches(self._pairs, bytes_max=BATCH_BYTES_MAX)
        copies = [partial(_copy, batch) for batch in pairs]
        todo = [*copies, *(partial(_fill, batch) for batch in _batches(self._reads))]
        # Torch does not see what is read; before, since a read that fails may have written, too.
        torch.autograd.graph.increment_version(self._read)
        _do(todo, initializer=limit_this_thread if copies else None)
        for owed in (self._pairs, self._reads, self._read):
            owed.clear()


def _do(todo: Sequence[Callable[[], None]], initializer: Callable[[], object] | None) -> None:
    threads = min(len(os.sched_getaffinity(0)), THREADS_COUNT_MAX, len(todo))
    if threads < 2:
        for do in todo:
            do()
        return
    with ThreadPoolExecutor(
        threads, thread_name_prefix="holdfast-load", initializer=initializer
    ) as pool:
        for done in [pool.submit(do) for do in todo]:
            done.result()


def as_in_memory(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """Return the pair as the target lies in memory: torch fills no views that turn signs around."""
    if target.is_conj():
        target, source = target.conj(), source.conj()
    if target.is_neg():
        target, source = torch._neg_view(target), torch._neg_view(source)  # noqa: SLF001
    return target, source


def _is_in_one_row(target: torch.Tensor) -> bool:
    return (
        type(target) is torch.Tensor
        and target.is_cpu
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def _batches(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    """Yield the reads in order, in lists of at most ``BATCH_BYTES_MAX``; what is longer is cut."""
    batch: list[_Read] = []
    left_bytes = BATCH_BYTES_MAX
    for fill, begin, memory in reads:
        at = 0
        while at < len(memory):
            if not left_bytes:
                yield batch
                batch, left_bytes = [], BATCH_BYTES_MAX
            part = memory[at : at + left_bytes]
            batch.append(_Read(fill, begin + at, part))
            at += len(part)
            left_bytes -= len(part)
    if batch:
        yield batch


def _copy(batch: Sequence[Pair]) -> None:
    with torch.no_grad():
        torch._foreach_copy_([target for target, _ in batch], [source for _, source in batch])


def _fill(batch: Sequence[_Read]) -> None:
    for fill, begin, memory in batch:
        fill(begin, memory)
