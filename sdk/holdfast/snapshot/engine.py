"""The copy engine: fills a slot from a plan, partly behind the trainer's back.

Header, blob and eager tensors are written on the caller's thread; deferred tensors by one
background thread, in chunks, so that a copy can be given up between two of them. The thread runs
torch's own loops on one core: it sets OpenMP's limit for itself alone, since
``torch.set_num_threads`` would change it for every thread that starts later (F40).
Times are seconds.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

import torch

from holdfast.errors import CheckpointError, InvalidRequestError, PreconditionError
from holdfast.logs import steady_logger
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.plan import SavePlan
from holdfast.threads import limit_this_thread

THREAD_NAME = "holdfast-copy"
CLOSE_S_MAX = 5.0
_LOG = steady_logger("holdfast.snapshot")


class Snapshot:
    """One copy of the state into one slot.

    Invariants: ends exactly once, ``copied`` or ``abandoned``; after an end nothing is written to
    ``buffer`` on its behalf, except that an abandoned copy may finish its current chunk.
    """

    def __init__(self, plan: SavePlan, buffer: SlotBuffer, *, step: int, generation: int) -> None:
        self.plan = plan
        self.buffer = buffer
        self.step = step
        self.generation = generation
        self.stall_s = 0.0
        self.copy_s = 0.0
        self.reason = ""
        self.taken = False
        self.sources = plan.sources()
        self.versions = plan.versions()
        self._copied = False
        self._lock = threading.Lock()

    @property
    def copied(self) -> bool:
        """Whether everything is in the slot."""
        return self._copied

    @property
    def abandoned(self) -> bool:
        """Whether the copy was given up; ``reason`` says why."""
        return bool(self.reason)

    @property
    def error(self) -> CheckpointError | None:
        """Why the copy was given up, as an error; None if it was not."""
        return PreconditionError(self.reason, step=self.step) if self.reason else None

    def end(self, *, reason: str = "") -> bool:
        """End the snapshot, as copied unless a reason is given; false if it had ended before."""
        with self._lock:
            if self._copied or self.reason:
                return False
            self._copied, self.reason = not reason, reason
            return True


class CopyEngine:
    """Copies one snapshot at a time.

    ``on_done(snapshot)`` is called once for each snapshot that ``begin`` returned, when nothing
    writes to its slot any more: on the background thread, or inside ``begin`` if nothing was
    deferred. It closes the slot, or lets it go if the snapshot was abandoned.

    ``busy`` is a plain attribute, true while a background copy has neither ended nor been given up:
    the gate reads it, so that a copy that hangs holds one optimizer step up and no other.
    """

    def __init__(self, on_done: Callable[[Snapshot], None]) -> None:
        self.busy = False
        self._on_done = on_done
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._current: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def begin(
        self,
        plan: SavePlan,
        buffer: SlotBuffer,
        *,
        step: int,
        generation: int,
        parent: tuple[int, int] | None = None,
        defer: bool = True,
    ) -> Snapshot:
        """Take the state as it is now; returns when only deferred tensors are left to copy.

        Args:
            plan: A plan for which ``is_current`` just said yes, or that was just made.
            buffer: A slot of the plan's length, being written.
            step: Optimizer steps completed.
            generation: Of this attempt.
            parent: (step, generation) restored from, if any.
            defer: False copies everything before returning.

        Raises:
            PreconditionError: a copy is in flight, this process is a fork, or the state no longer
                fits the plan (``plan.is_current`` is false from then on).
            InvalidRequestError: a value that cannot be saved.
        """
        begun_s = time.perf_counter()
        if os.getpid() != self._pid:
            raise PreconditionError("a forked child process cannot save")
        if not self._idle.is_set():
            raise PreconditionError("the copy of an earlier save has not ended")
        views = buffer.views(plan)
        snapshot = Snapshot(plan, buffer, step=step, generation=generation)
        text, live = plan.take_live()
        buffer.write_header(plan, step=step, generation=generation, parent=parent)
        buffer.write(views.blob[0], text)
        eager = [piece.tensor for piece in plan.eager]
        plan.check(plan.eager)
        _copy(
            [*views.eager, *(views.live[name] for name in live)],
            [*eager, *live.values()],
        )
        if defer and plan.deferred:
            snapshot.stall_s = time.perf_counter() - begun_s
            self._hand_over(snapshot)
            return snapshot
        for chunk in plan.chunks:
            _copy_chunk(snapshot, chunk)
        snapshot.end()
        snapshot.stall_s = snapshot.copy_s = time.perf_counter() - begun_s
        self._on_done(snapshot)
        return snapshot

    def _hand_over(self, snapshot: Snapshot) -> None:
        """Leave ``snapshot`` to the copy thread, or raise and have that thread let it go.

        Ctrl-C may come between any two of these lines: the slot is the copy thread's in any case.
        """
        self._start()
        try:
            snapshot.buffer.in_copy = True
            self._current = snapshot
            self._idle.clear()
            self.busy = True
            self._queue.put(snapshot)
        except BaseException:
            snapshot.buffer.in_copy = True
            if snapshot.end(reason="interrupted"):
                self._queue.put(snapshot)  # perhaps once more: the thread takes it once
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until no background copy reads the state; false if it still does."""
        if os.getpid() != self._pid:
            return True
        return self._idle.wait(timeout_s)

    def abandon(self, reason: str) -> None:
        """Give up the copy in flight, if any; it stops after its current chunk."""
        snapshot = self._current
        if snapshot is not None and snapshot.end(reason=reason):
            self.busy = False

    def close(self, timeout_s: float = CLOSE_S_MAX) -> bool:
        """Give up what is in flight and end the thread; false if it hangs (it is a daemon)."""
        self.abandon("the checkpointer was closed")
        if self._thread is None or os.getpid() != self._pid:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        limit_this_thread()
        while (snapshot := self._queue.get()) is not None:
            if snapshot.taken:
                continue
            snapshot.taken = True
            self._copy_deferred(snapshot)
            self._current = None
            self.busy = False
            self._idle.set()
            try:
                self._on_done(snapshot)
            except Exception:  # noqa: BLE001 - the edge of this thread
                _LOG.exception("closing the snapshot of step %d failed", snapshot.step)

    def _copy_deferred(self, snapshot: Snapshot) -> None:
        begun_s = time.perf_counter()
        try:
            for chunk in snapshot.plan.chunks:
                if snapshot.abandoned:
                    return
                _copy_chunk(snapshot, chunk)
            _check_writes(snapshot)
        except Exception as cause:  # noqa: BLE001 - whatever it is, the gate must open again
            snapshot.plan.give_up()
            snapshot.end(reason=f"copy failed: {cause}")
        finally:
            snapshot.copy_s = time.perf_counter() - begun_s
        snapshot.end()


def _check_writes(snapshot: Snapshot) -> None:
    """Give the save up if a parameter was written while it was copied, the gate passed by.

    Not all writes are seen (fused kernels, ``.data``); those that are cost one save, not more.
    """
    plan = snapshot.plan
    written = plan.written_since(snapshot.versions)
    reason = f"{len(written)} parameters, such as {written[:1]}, were written outside an optimizer"
    if written and snapshot.end(reason=f"{reason}: from now on they are copied at once"):
        plan.capture.never_defer(written)
        plan.give_up()


def _copy_chunk(snapshot: Snapshot, chunk: range) -> None:
    views = snapshot.buffer.deferred(snapshot.plan)
    snapshot.plan.check_sources(chunk)
    part = slice(chunk.start, chunk.stop)
    _copy(views[part], snapshot.sources[part])


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if not targets:
        return
    try:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)  # one call, no loop under the GIL
    except NotImplementedError as cause:
        raise InvalidRequestError(f"torch cannot copy this state: {cause}") from cause
