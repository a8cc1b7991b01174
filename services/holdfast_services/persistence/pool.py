"""The threads that move parts: as many as parts may be in flight, shared by all items."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class PartPool:
    """Daemon threads: one that waits for a dead peer must not keep the process from ending.

    Also owns the buffers that parts are read into. Only these threads have one, so there are
    never more than ``threads_count``, each as long as the longest part.
    """

    def __init__(self, threads_count: int) -> None:
        self.threads_count = threads_count
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(2 * threads_count)
        self._buffers: list[mmap.mmap] = []
        for number in range(threads_count):
            threading.Thread(target=self._run, name=f"part-{number}", daemon=True).start()

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return what ``work`` returns for each item, in any order; as many at once as threads.

        Not to be called from one of the pool's own threads.

        Raises:
            BaseException: the first that ``work`` raised; no further item is begun, and those
                under way have ended.
        """
        pending: set[Future[R]] = set()
        results: list[R] = []
        try:
            for item in items:
                if len(pending) >= self.threads_count:
                    ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                    results += [future.result() for future in ended]
                pending.add(self._submit(work, item))
            results += [future.result() for future in pending]
        finally:
            wait(pending)
        return results

    @contextmanager
    def buffer(self, length_bytes: int) -> Iterator[memoryview]:
        """Lend memory that was touched before, if there is any: first touch costs most."""
        memory = self._buffer(length_bytes)
        try:
            yield memoryview(memory)[:length_bytes]
        finally:
            self._buffers.append(memory)

    @property
    def waiting_count(self) -> int:
        """How many parts no thread has taken yet."""
        return self._work.qsize()

    def trim(self) -> None:
        """Free the memory of unused buffers."""
        self._buffers.clear()

    def close(self) -> None:
        """Let threads end that have nothing to do; those at work end after it."""
        with suppress(queue.Full):
            for _ in range(self.threads_count):
                self._work.put_nowait(None)

    def _buffer(self, length_bytes: int) -> mmap.mmap:
        try:
            memory = self._buffers.pop()
        except IndexError:
            return mmap.mmap(-1, length_bytes)
        return memory if len(memory) >= length_bytes else mmap.mmap(-1, length_bytes)

    def _submit(self, work: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()

        def task() -> None:
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 - raised again by who waits
                future.set_exception(error)

        self._work.put(task)
        return future

    def _run(self) -> None:
        task: Any = self._work.get()
        while task is not None:
            task()
            task = self._work.get()
