"""Copies tensors behind the trainer's back, for saves that another framework asks for.

Only what an optimizer's step alone writes may be copied later, and a gate holds that step up until
it is. Times are seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from holdfast.errors import PreconditionError
from holdfast.reading.dtypes import is_freed
from holdfast.threads import limit_this_thread

CHUNK_BYTES_MAX = 64 << 20
CHUNK_TENSORS_MAX = 4096

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to fill, each with the one whose values it gets."""


class Copies:
    """Copies one state at a time, on a thread of its own that uses one core.

    ``busy`` is what a gate looks at: True while a copy has neither ended nor been given up.
    ``may_defer``: no tensor was ever seen written while it was copied.
    """

    def __init__(self) -> None:
        self.busy = False
        self.may_defer = True
        self._reason = ""
        self._idle = threading.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(1, "holdfast-copy", initializer=limit_this_thread)

    def begin(self, now: Pairs, later: Pairs, staged: Any) -> Future[Any]:
        """Copy ``now`` at once, and ``later`` on the thread; the future then has ``staged``."""
        _copy(now)
        if not later:
            done: Future[Any] = Future()
            done.set_result(staged)
            return done
        self._reason = ""
        self._idle.clear()
        self.busy = True
        versions = [_version(source) for _, source in later]
        with ExitStack() as undo:
            undo.callback(self._end)
            future = self._pool.submit(self._run, later, versions, staged)
            undo.pop_all()
        return future

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being copied; False if it still is."""
        return self._idle.wait(timeout_s)

    def abandon(self, reason: str) -> None:
        """Give up the copy that goes on; it stops after its current chunk."""
        self._reason = reason
        self.busy = False

    def close(self, timeout_s: float) -> None:
        """Wait for the copy that goes on; end the thread."""
        if not self.wait(timeout_s):
            self.abandon("what copies was closed")
        self._pool.shutdown(wait=False)

    def _run(self, later: Pairs, versions: Sequence[int], staged: Any) -> Any:
        try:
            for chunk in _chunks(later):
                if self._reason:
                    raise PreconditionError(self._reason)
                if any(is_freed(source) for _, source in chunk):
                    raise PreconditionError(
                        "the memory of a tensor was freed (untyped_storage().resize_(0)) while the "
                        "state was copied: free it after the next step of the optimizer"
                    )
                _copy(chunk)
            now = [_version(source) for _, source in later]
            if now != list(versions):
                self.may_defer = False
                raise PreconditionError(
                    "a parameter was written outside an optimizer while it was copied: from now on "
                    "everything is copied before a save returns"
                )
            return staged
        finally:
            self._end()

    def _end(self) -> None:
        self.busy = False
        self._idle.set()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _copy(pairs: Pairs) -> None:
    if pairs:
        with torch.no_grad():
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(list(targets), list(sources))


def _chunks(pairs: Pairs) -> Iterator[Pairs]:
    """Yield runs of ``pairs`` of bounded size; a tensor is never cut."""
    begin = size = 0
    for at, (target, _) in enumerate(pairs):
        if at > begin and (
            size + target.nbytes > CHUNK_BYTES_MAX or at - begin == CHUNK_TENSORS_MAX
        ):
            yield pairs[begin:at]
            begin, size = at, 0
        size += target.nbytes
    yield pairs[begin:]
