"""Copies that a restore owes, done at once by as many threads as there are cores.

A restore of one gigabyte is bound by page faults on both sides and by one core's memcpy; both
halve on two cores (measured: 131 ms on one thread, 75 ms on two, sources in tmpfs not yet
mapped). Each thread runs torch's own loops on one core. Knows nothing of names or files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from holdfast.copying.batches import Pair, batches
from holdfast.threads import limit_this_thread

BATCH_BYTES_MAX = 16 << 20
THREADS_COUNT_MAX = 16


class Transfer:
    """Pairs of target and source of equal shape and dtype; ``run`` fills the targets."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Owe a copy; both must stay as they are until ``run`` has returned."""
        self._pairs.append(as_in_memory(target.detach(), source))

    def run(self) -> None:
        """Do all copies that are owed."""
        todo = list(batches(self._pairs, bytes_max=BATCH_BYTES_MAX))
        self._pairs.clear()
        threads = min(len(os.sched_getaffinity(0)), THREADS_COUNT_MAX, len(todo))
        if threads < 2:
            for batch in todo:
                _copy(batch)
            return
        with ThreadPoolExecutor(
            threads, thread_name_prefix="holdfast-load", initializer=limit_this_thread
        ) as pool:
            for done in [pool.submit(_copy, batch) for batch in todo]:
                done.result()


def as_in_memory(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """Return the pair as the target lies in memory: torch fills no views that turn signs around."""
    if target.is_conj():
        target, source = target.conj(), source.conj()
    if target.is_neg():
        target, source = torch._neg_view(target), torch._neg_view(source)  # noqa: SLF001
    return target, source


def _copy(batch: Sequence[Pair]) -> None:
    with torch.no_grad():
        torch._foreach_copy_([target for target, _ in batch], [source for _, source in batch])
