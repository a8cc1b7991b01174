"""The copy engine: fills a slot from a plan, partly behind the trainer's back.

Header, blob and eager tensors are copied on the caller's thread, deferred tensors by one
background thread, in chunks, so that a copy can be given up between two of them. What lies on an
accelerator is only queued there, by either thread; see ``holdfast.copying``. The thread runs
torch's own loops on one core: it sets OpenMP's limit for itself alone, since
``torch.set_num_threads`` would change it for every thread that starts later (F40).
Times are seconds.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby

import torch

from holdfast.copying.batches import cut
from holdfast.copying.copiers import Copiers
from holdfast.copying.port import Device
from holdfast.errors import CheckpointError, PreconditionError
from holdfast.logs import steady_logger
from holdfast.snapshot.buffer import SlotBuffer, Views
from holdfast.snapshot.pieces import Run
from holdfast.snapshot.plan import SavePlan
from holdfast.snapshot.second_look import changed_unseen
from holdfast.snapshot.twins import Twins
from holdfast.threads import limit_this_thread

THREAD_NAME = "holdfast-copy"
CLOSE_S_MAX = 5.0
_LOG = steady_logger("holdfast.snapshot")


class Snapshot:
    """One copy of the state into one slot.

    Invariants: ends exactly once, ``copied`` or ``abandoned``; after an end nothing is written to
    ``buffer`` on its behalf, except that an abandoned copy may finish what is under way.
    ``deferred``: something is copied after ``begin`` has returned and before the gate opens.
    ``sources`` and ``held`` hold the memory that is copied, until the copy has ended.
    ``kept_bytes`` of the segment are not copied: they are frozen, and the slot has them.
    ``hurried``: somebody waits for the end of the copy; what nobody needs is left out.
    """

    def __init__(
        self, plan: SavePlan, buffer: SlotBuffer, *, step: int, generation: int, deferred: bool
    ) -> None:
        self.plan = plan
        self.buffer = buffer
        self.step = step
        self.generation = generation
        self.deferred = deferred
        self.kept_bytes = plan.frozen.length_bytes if buffer.keeps(plan) else 0
        self.stall_s = 0.0
        self.copy_s = 0.0
        self.reason = ""
        self.taken = False
        self.hurried = False
        self.sources = plan.sources()
        self.held: list[torch.Tensor] = []
        self._versions = plan.versions()
        self._passed: list[int] | None = None
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

    def pass_gate(self) -> None:
        """Remember what was written until now: whatever is written later comes after the copy."""
        with self._lock:
            if self._passed is None:
                self._passed = self.plan.versions()

    def written(self) -> list[str]:
        """Return the parameters that were written between the start and the gate, or until now."""
        self.pass_gate()
        assert self._passed is not None
        return self.plan.written_between(self._versions, self._passed)

    def let_go(self) -> None:
        """Forget what was copied, so that its memory may be used again."""
        self.sources, self.held = [], []


class CopyEngine:
    """Copies one snapshot at a time.

    ``on_done(snapshot)`` is called once for each snapshot that ``begin`` returned, when nothing
    writes to its slot any more: on the background thread, or inside ``begin`` if nothing was
    deferred and nothing is under way. It closes the slot, or lets it go if the snapshot was
    abandoned.

    ``twins`` are filled after each copy while nobody waits. ``behind``: ``on_done`` takes its time,
    and is never called inside ``begin``.

    ``busy`` is a plain attribute, true while a deferred copy has neither ended nor been given up:
    the gate reads it, so that a copy that hangs holds one optimizer step up and no other.
    """

    def __init__(
        self,
        on_done: Callable[[Snapshot], None],
        twins: Twins | None = None,
        *,
        behind: bool = False,
    ) -> None:
        self.busy = False
        self._behind = behind
        self._twins = twins
        self._on_done = on_done
        self._copiers = Copiers()
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._passable = threading.Event()
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

        What lies on an accelerator may be under way then, deferred or not: whatever the caller's
        stream gets next comes after the copies of the latter.

        Args:
            plan: A plan for which ``is_current`` just said yes, or that was just made.
            buffer: A slot of the plan's length, being written.
            step: Optimizer steps completed.
            generation: Of this attempt.
            parent: (step, generation) restored from, if any.
            defer: False defers nothing.

        Raises:
            PreconditionError: a copy is in flight, this process is a fork, an accelerator does not
                answer any more, or the state no longer fits the plan (``plan.is_current`` is false
                from then on).
            InvalidRequestError: a value that cannot be saved.
            RuntimeError: an accelerator fails, or has no memory left.
        """
        begun_s = time.perf_counter()
        if os.getpid() != self._pid:
            raise PreconditionError("a forked child process cannot save")
        if not self._idle.is_set():
            raise PreconditionError("the copy of an earlier save has not ended")
        if self._copiers.lost and plan.accelerators:
            raise PreconditionError(self._copiers.lost)
        views = buffer.views(plan)
        deferred = defer and bool(plan.deferred)
        snapshot = Snapshot(plan, buffer, step=step, generation=generation, deferred=deferred)
        text, live = plan.take_live()
        buffer.write_header(plan, step=step, generation=generation, parent=parent)
        buffer.write(views.blob[0], text)
        plan.check(plan.eager)
        try:
            self._copy_now(snapshot, views, live)
        except BaseException as cause:
            if plan.accelerators:  # perhaps something is under way
                self._hand_over(snapshot, reason=f"copy failed: {cause or type(cause).__name__}")
            raise
        if deferred or self._copiers.under_way or plan.frozen.spans or self._behind:
            snapshot.stall_s = time.perf_counter() - begun_s
            self._hand_over(snapshot)
            return snapshot
        snapshot.end()
        snapshot.let_go()
        snapshot.stall_s = snapshot.copy_s = time.perf_counter() - begun_s
        self._on_done(snapshot)
        return snapshot

    def _copy_now(self, snapshot: Snapshot, views: Views, live: dict[str, torch.Tensor]) -> None:
        """Copy what is not deferred, or have it copied before whatever this thread does next."""
        plan = snapshot.plan
        for device, begin, end in plan.eager_runs:
            eager = [piece.tensor for piece in plan.eager[begin:end]]
            if device is not None:
                eager = [tensor.detach() for tensor in eager]
                snapshot.held += eager
            self._copiers.of(device).now(views.eager[begin:end], eager)
        if not snapshot.kept_bytes:
            self._copy_frozen(snapshot)
        snapshot.held += live.values()
        for device, names in groupby(live, lambda name: plan.devices.of(live[name])):
            group = list(names)
            targets = [views.live[name] for name in group]
            self._copiers.of(device).now(targets, [live[name] for name in group])
        if snapshot.deferred:
            for device in plan.accelerators:
                self._copiers.of(device)  # made here: a stream of its own
            self._copiers.mark()
            return
        for chunk in plan.chunks:
            self._copiers.of(chunk.device).now(*_of_chunk(snapshot, chunk))

    def _copy_frozen(self, snapshot: Snapshot) -> None:
        """Copy what is frozen into a slot that does not have it yet."""
        pieces = snapshot.plan.frozen.pieces
        snapshot.plan.check(pieces)
        targets = snapshot.buffer.frozen(snapshot.plan)
        for device, begin, end in snapshot.plan.frozen.runs:
            sources = [piece.tensor.detach() for piece in pieces[begin:end]]
            snapshot.held += sources
            self._copiers.of(device).now(targets[begin:end], sources)

    def _hand_over(self, snapshot: Snapshot, *, reason: str = "") -> None:
        """Leave ``snapshot`` to the copy thread, or raise and have that thread let it go.

        Ctrl-C may come between any two of these lines: the slot is the copy thread's in any case.
        With a ``reason`` that thread waits for what is under way, no more.
        """
        self.start()
        try:
            snapshot.buffer.in_copy = True
            if reason:
                snapshot.end(reason=reason)
            self._current = snapshot
            self._passable.clear()
            self._idle.clear()
            self.busy = snapshot.deferred and not reason
            self._queue.put(snapshot)
        except BaseException:
            snapshot.buffer.in_copy = True
            if snapshot.end(reason="interrupted"):
                self._queue.put(snapshot)  # perhaps once more: the thread takes it once
            raise

    def let_pass(self, timeout_s: float) -> bool:
        """Have what this thread does next to the state come after the copy; False: not in time.

        Waits for the tensors in host memory, and until all copies of the others are queued; for
        these the caller's stream waits, not the caller.
        """
        snapshot = self._current
        if snapshot is None:
            return True
        snapshot.hurried = True
        self._copiers.hurry()
        if not self._passable.wait(timeout_s):
            return False
        if snapshot.plan.accelerators:
            try:
                self._copiers.hold()
            except RuntimeError as cause:
                self.abandon(f"copy failed: {cause}")
            snapshot.pass_gate()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until no background copy reads the state; false if it still does."""
        if os.getpid() != self._pid:
            return True
        snapshot = self._current
        if snapshot is not None:
            snapshot.hurried = True
        return self._idle.wait(timeout_s)

    def lost(self, devices: Iterable[Device]) -> str:
        """Return why one of ``devices`` does not answer any more; empty: they do. While idle."""
        return self._copiers.look(devices)

    def abandon(self, reason: str) -> None:
        """Give up the copy in flight, if any; it stops after what is under way."""
        snapshot = self._current
        if snapshot is not None and snapshot.end(reason=reason):
            self.busy = False
            self._copiers.hurry()

    def close(self, timeout_s: float = CLOSE_S_MAX) -> bool:
        """Give up what is in flight and end the thread; false if it hangs (it is a daemon)."""
        self.abandon("the checkpointer was closed")
        if self._thread is None or os.getpid() != self._pid:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def start(self) -> None:
        """Have the copy thread run, if it does not: the first copy else starts it."""
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
            self._fill_twins(snapshot)
            snapshot.let_go()
            self._current = None
            self.busy = False
            self._passable.set()
            self._settle(snapshot)
            self._idle.set()
            try:
                self._on_done(snapshot)
            except Exception:  # noqa: BLE001 - the edge of this thread
                _LOG.exception("closing the snapshot of step %d failed", snapshot.step)

    def _settle(self, snapshot: Snapshot) -> None:
        """End a snapshot whose copies are in the slot; no training waits any more."""
        if snapshot.abandoned:
            return
        reason = ""
        try:
            if snapshot.kept_bytes:
                reason = self._look_again(snapshot)
            elif snapshot.plan.frozen.spans:
                snapshot.plan.compare_frozen(snapshot.buffer.keep(snapshot.plan))
        except CheckpointError as error:  # the slot was let go of
            reason = error.message
        except Exception as cause:  # noqa: BLE001 - whatever it is, there must be a next save
            reason = f"copy failed: {cause}"
            self._copiers.clear_up()
        snapshot.end(reason=reason)

    def _look_again(self, snapshot: Snapshot) -> str:
        """Return what is wrong with what the slot has kept; empty: nothing.

        It is hashed: what rots in a slot would else be in all saves to come. Where a strip of it
        was copied again and was other bytes, and the digest is not right with it either, it is
        training that has changed.
        """
        plan, buffer = snapshot.plan, snapshot.buffer
        changed = changed_unseen(plan, buffer, self._copiers)
        if buffer.check_kept(plan):
            return ""
        if changed:
            plan.found_changed(changed)
            return f"frozen tensors {changed[0]!r} and maybe more have changed unseen"
        return f"bytes of frozen tensors have changed in slot {buffer.slot}"

    def _copy_deferred(self, snapshot: Snapshot) -> None:
        begun_s = time.perf_counter()
        try:
            if snapshot.abandoned:  # `begin` has failed
                self._copiers.clear_up()
            self._copy_chunks(snapshot)
            if snapshot.plan.accelerators:
                self._passable.set()
            self._copiers.land()
            if snapshot.deferred:
                _check_memory(snapshot)
                _check_writes(snapshot)
        except Exception as cause:  # noqa: BLE001 - whatever it is, the gate must open again
            if not (snapshot.plan.accelerators and isinstance(cause, RuntimeError)):
                snapshot.plan.give_up()  # else it was the device
            snapshot.end(reason=f"copy failed: {cause}")
            self.busy = False
            self._passable.set()
            self._copiers.clear_up()
        finally:
            snapshot.copy_s = time.perf_counter() - begun_s

    def _fill_twins(self, snapshot: Snapshot) -> None:
        """Copy what other ranks save, and this one has alike, until somebody waits for it."""
        if self._twins is None or not snapshot.deferred or snapshot.abandoned:
            return
        try:
            self._twins.fill(
                snapshot.plan, self._copiers, lambda: snapshot.hurried or snapshot.abandoned
            )
        except Exception:  # noqa: BLE001 - a hint is not worth a save, nor a gate that stays shut
            _LOG.exception("slots for copies are not filled at step %d", snapshot.step)

    def _copy_chunks(self, snapshot: Snapshot) -> None:
        todo = deque(snapshot.plan.chunks if snapshot.deferred else ())
        while todo:
            device = todo[0].device
            if device is not None and snapshot.hurried:
                self._queue_all(snapshot, device, todo)
                continue
            targets, sources = _of_chunk(snapshot, todo.popleft())
            copier = self._copiers.of(device)
            if len(targets) > 1:
                if snapshot.abandoned:
                    return
                copier.later(targets, sources)
                continue
            for target, source in cut((targets[0], sources[0])):
                if snapshot.abandoned:
                    return
                copier.later([target], [source])

    def _queue_all(self, snapshot: Snapshot, device: Device, todo: deque[Run]) -> None:
        """Queue what is left of an accelerator by one call: training waits until that is done."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        while todo and todo[0].device is device:
            into, out_of = _of_chunk(snapshot, todo.popleft())
            if len(into) > 1:
                targets += into
                sources += out_of
                continue
            for target, source in cut((into[0], out_of[0])):
                targets.append(target)
                sources.append(source)
        if not snapshot.abandoned:
            self._copiers.of(device).later(targets, sources)


def _check_memory(snapshot: Snapshot) -> None:
    """See that nothing was freed while an accelerator copied it: somebody else may have it now.

    Raises:
        InvalidRequestError: something was.
    """
    for chunk in snapshot.plan.chunks if snapshot.plan.accelerators else ():
        if chunk.device is not None:
            snapshot.plan.check_sources(snapshot.sources, chunk)


def _check_writes(snapshot: Snapshot) -> None:
    """Give the save up if a parameter was written while it was copied, the gate passed by.

    Not all writes are seen (fused kernels, ``.data``); those that are cost one save, not more.
    """
    plan, written = snapshot.plan, snapshot.written()
    reason = f"{len(written)} parameters, such as {written[:1]}, were written outside an optimizer"
    if written and snapshot.end(reason=f"{reason}: from now on they are copied at once"):
        plan.capture.never_defer(written)
        plan.give_up()


def _of_chunk(snapshot: Snapshot, chunk: Run) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the places of a chunk in the slot, and what goes there.

    Raises:
        InvalidRequestError: some of it was freed meanwhile.
    """
    snapshot.plan.check_sources(snapshot.sources, chunk)
    views = snapshot.buffer.deferred(snapshot.plan)
    return views[chunk.begin : chunk.end], snapshot.sources[chunk.begin : chunk.end]
