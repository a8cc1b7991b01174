"""Copies tensors behind the trainer's back, for saves that another framework asks for.

Only what an optimizer's step alone writes may be copied later, and a gate holds that step up until
it is. Times are seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from holdfast.copying.batches import Pair, batches
from holdfast.copying.copiers import Copiers
from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Device, Devices
from holdfast.errors import PreconditionError
from holdfast.reading.dtypes import is_freed
from holdfast.threads import limit_this_thread


class Copies:
    """Copies one state at a time, on a thread of its own that uses one core.

    ``busy`` is what a gate looks at: True while a deferred copy has neither ended nor been given
    up. ``may_defer``: no tensor was ever seen written while it was copied.
    """

    def __init__(self, devices: Devices = CUDA) -> None:
        self.busy = False
        self.may_defer = True
        self._devices = devices
        self._copiers = Copiers()
        self._reason = ""
        self._sources: list[torch.Tensor] = []
        self._passed: list[int] | None = None
        self._lock = threading.Lock()
        self._passable = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(1, "holdfast-copy", initializer=limit_this_thread)

    def may_be_late(self, tensor: torch.Tensor) -> bool:
        """Tell whether what copies ``tensor`` keeps to the order of training's work on it."""
        return tensor.is_cpu or self._devices.of(tensor) is not None

    def begin(self, now: Sequence[Pair], later: Sequence[Pair], staged: Any) -> Future[Any]:
        """Copy ``now`` at once, and ``later`` on the thread; the future then has ``staged``.

        What lies on an accelerator is under way when this returns, that of ``now`` as well.

        Raises:
            PreconditionError: an accelerator does not answer any more, or a graph is captured.
            RuntimeError: an accelerator fails, or has no memory left.
        """
        if self._devices.capturing():
            raise PreconditionError("a graph is being captured: stage outside of it")
        if self._copiers.lost:
            raise PreconditionError(self._copiers.lost)
        groups = self._by_device(later)
        with ExitStack() as undo:
            undo.callback(self._clear_up_behind, now)
            for device, pairs in self._by_device(now).items():
                self._copiers.of(device).now(*_apart(pairs))
            for device in groups:
                self._copiers.of(device)  # made here: a stream of its own
            if later:
                self._copiers.mark()
            undo.pop_all()
        if not later and not self._copiers.under_way:
            done: Future[Any] = Future()
            done.set_result(staged)
            return done
        self._reason, self._passed = "", None
        self._sources = [source for _, source in later]
        versions = self._versions()
        self._passable.clear()
        self._idle.clear()
        self.busy = bool(later)
        with ExitStack() as undo:
            undo.callback(self._end)
            future = self._pool.submit(self._run, groups, versions, now, staged)
            undo.pop_all()
        return future

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being copied; False if it still is."""
        return self._idle.wait(timeout_s)

    def let_pass(self, timeout_s: float) -> bool:
        """See ``optimizer_gate.Copying.let_pass``."""
        self._copiers.hurry()
        if not self._passable.wait(timeout_s):
            return False
        self._pass_gate()
        try:
            self._copiers.hold()
        except RuntimeError as cause:
            self.abandon(f"copy failed: {cause}")
        return True

    def abandon(self, reason: str) -> None:
        """Give up the copy that goes on; it stops after what is under way."""
        self._reason = reason
        self.busy = False
        self._copiers.hurry()

    def close(self, timeout_s: float) -> None:
        """Wait for the copy that goes on; end the thread."""
        if not self.wait(timeout_s):
            self.abandon("what copies was closed")
        self._pool.shutdown(wait=False)

    def _run(
        self,
        groups: dict[Device | None, list[Pair]],
        versions: list[int],
        held: Sequence[Pair],
        staged: Any,
    ) -> Any:
        del held  # by the executor, until this returns
        with ExitStack() as ending:
            ending.callback(self._end)
            failing = ending.enter_context(ExitStack())
            failing.callback(self._copiers.clear_up)
            failing.callback(self._open_gate)
            for device, pairs in groups.items():
                for batch in batches(pairs):
                    self._check_on()
                    _check_memory(batch)
                    self._copiers.of(device).later(*_apart(batch))
            if any(device is not None for device in groups):
                self._passable.set()
            self._copiers.land()
            self._check_on()
            for device, pairs in groups.items():
                if device is not None:  # by then nobody may write there again
                    _check_memory(pairs)
            if self._pass_gate() != versions:
                self.may_defer = False
                raise PreconditionError(
                    "a parameter was written outside an optimizer while it was copied: from now on "
                    "everything is copied before a save returns"
                )
            failing.pop_all()
        return staged

    def _clear_up_behind(self, held: Sequence[Pair]) -> None:
        """Wait for what is under way of copies that failed to begin, on the thread for that."""
        self._idle.clear()
        self._pool.submit(self._clear_up, held)

    def _clear_up(self, held: Sequence[Pair]) -> None:
        del held  # by the executor, until this returns
        try:
            self._copiers.clear_up()
        finally:
            self._idle.set()

    def _check_on(self) -> None:
        if self._reason:
            raise PreconditionError(self._reason)

    def _pass_gate(self) -> list[int]:
        """Return what was written until the gate opened: what comes later comes after the copy."""
        with self._lock:
            if self._passed is None:
                self._passed = self._versions()
            return self._passed

    def _versions(self) -> list[int]:
        return [0 if t.is_inference() else t._version for t in self._sources]  # noqa: SLF001

    def _by_device(self, pairs: Iterable[Pair]) -> dict[Device | None, list[Pair]]:
        """Return the pairs by what has their sources; those of accelerators come first."""
        groups: dict[Device | None, list[Pair]] = {}
        for pair in pairs:
            groups.setdefault(self._devices.of(pair[1]), []).append(pair)
        return dict(sorted(groups.items(), key=lambda item: item[0] is None))

    def _open_gate(self) -> None:
        self.busy = False
        self._passable.set()

    def _end(self) -> None:
        self._sources = []
        self._open_gate()
        self._idle.set()


def _check_memory(pairs: Iterable[Pair]) -> None:
    if any(is_freed(source) for _, source in pairs):
        raise PreconditionError(
            "the memory of a tensor was freed (untyped_storage().resize_(0)) while the state was "
            "copied: free it after the next step of the optimizer"
        )


def _apart(pairs: Sequence[Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the targets and the sources."""
    return [target for target, _ in pairs], [source for _, source in pairs]
