"""A device without CUDA: streams, events and copies that happen late, in the worst order.

Its memory is a piece of the host's. Nothing that is queued is done before somebody waits for it or
looks, and then streams take turns as ``order`` says: whoever forgot a wait finds wrong bytes. What
is freed is written over by the next work of training, as a caching allocator has it.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

ALIGNMENT_BYTES = 64
SCRIBBLE = 0xEE
WAIT_S = 30.0
Order = Literal["training first", "copies first", "at random"]


class LateEvent:
    """A point in a stream."""

    def __init__(self, device: LateDevice) -> None:
        self.reached = False
        self._device = device

    def query(self) -> bool:
        self._device.work_a_little()
        return self.reached

    def synchronize(self) -> None:
        self._device.work_until(self)


class LateStream:
    """Work that is done in order: to do, an event to wait for, or one that is reached."""

    def __init__(self, device: LateDevice) -> None:
        self.todo: deque[Callable[[], None] | LateEvent] = deque()
        self._device = device

    def wait_event(self, event: LateEvent) -> None:
        self._device.check()
        with self._device.lock:
            self.todo.append(event)


class LateDevice:
    """The ``port.Device``, and the ``port.Devices`` of a process that has no other one.

    ``faults`` are what a real driver would not forgive; ``registered`` are the places of memory
    that it knows. ``refuse`` has ``register`` fail, ``fail_copy`` the copy after so many others,
    ``lost`` everything from then on. ``captures``: what training queues is captured in a graph.
    """

    def __init__(self, order: Order = "training first", *, length_bytes: int = 1 << 20) -> None:
        self.name = "late:0"
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self.registered: dict[int, int] = {}
        self.refuse = ""
        self.lost = ""
        self.captures = False
        self.fail_copy: tuple[int, Exception] | None = None
        self.copies_count = 0
        self._array = np.zeros(length_bytes, dtype=np.uint8)
        self._memory = torch.from_numpy(self._array)
        self._used_bytes = 0
        self._order = order
        self._random = random.Random(7)
        self._awake = threading.Event()
        self._awake.set()
        self.training = LateStream(self)
        self._streams = [self.training]
        self._current = threading.local()
        self._aside = threading.local()
        self._flying: list[tuple[int, int]] = []

    def of(self, tensor: torch.Tensor) -> LateDevice | None:
        return self if self._holds(tensor) else None

    def capturing(self) -> bool:
        return self.captures

    def stand_aside(self) -> None:
        self._aside.done = True

    def stands_aside(self) -> bool:
        """Tell whether this thread's calls end no capture."""
        return getattr(self._aside, "done", False)

    def current_stream(self) -> LateStream:
        self.check()
        return getattr(self._current, "stream", self.training)

    def new_stream(self) -> LateStream:
        self.check()
        stream = LateStream(self)
        self._streams.append(stream)
        return stream

    def record(self, stream: LateStream) -> LateEvent:
        self.check()
        event = LateEvent(self)

        def reach() -> None:
            event.reached = True

        with self.lock:
            stream.todo.append(reach)
        return event

    def copy(
        self, stream: LateStream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        self.check()
        with self.lock:
            for target, source in zip(targets, sources, strict=True):
                assert target.shape == source.shape
                self.copies_count += 1
                if self.fail_copy and self.copies_count > self.fail_copy[0]:
                    (_, error), self.fail_copy = self.fail_copy, None
                    raise error
                self._queue_copy(stream, target, source)
        host = [*targets, *sources]
        if not all(self.is_pinned(t) for t in host if t.numel() and not self._holds(t)):
            self.record(stream).synchronize()  # the driver copies through memory of its own

    def register(self, memory: torch.Tensor, *, writable: bool = True) -> None:
        self.check()
        del writable
        if self.refuse:
            raise RuntimeError(self.refuse)
        if memory.data_ptr() in self.registered:
            raise RuntimeError("already registered")
        self.registered[memory.data_ptr()] = memory.nbytes

    def unregister(self, memory: torch.Tensor) -> None:
        self.check()
        begin = memory.data_ptr()
        if self.registered.pop(begin, None) is None:
            self.faults.append("unregistered what is not")
        end = begin + memory.nbytes
        if any(begin <= first < end or begin < last <= end for first, last in self._flying):
            self.faults.append("unregistered under a copy")

    # ------------------------------------------------------------------ what training does

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on this device with these values and strides."""
        length_bytes = max(values.untyped_storage().nbytes(), values.itemsize)  # also of nothing
        begin = self._used_bytes
        self._used_bytes += length_bytes + -length_bytes % ALIGNMENT_BYTES
        assert self._used_bytes <= len(self._array), "make the device bigger"
        array = self._array[begin : begin + length_bytes]
        view = np.frombuffer(array.data, dtype=np.uint8)  # an object of its own: it may die
        weakref.finalize(view, self._scribble, begin, length_bytes)
        flat = torch.from_numpy(view).view(values.dtype)
        placed = flat.as_strided(values.shape, values.stride(), values.storage_offset())
        placed.copy_(values)
        return placed

    def launch(self, work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        """Queue work on the memory of ``tensor``; a kernel knows the memory and nothing else."""
        raw = self._raw(tensor)
        torch.autograd.graph.increment_version(tensor)
        with self.lock:
            self.current_stream().todo.append(lambda: work(raw))

    @contextmanager
    def use(self, stream: LateStream) -> Iterator[None]:
        """Have this thread queue on another stream."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # ------------------------------------------------------------------ when work is done

    def sleep(self) -> None:
        """Do no work, whoever waits for it."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def lose(self, text: str) -> None:
        """Fail for good, as after an illegal access; who waits is told."""
        self.lost = text
        self.wake()

    def check(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)

    def finish(self) -> None:
        """Do all that is queued and can be done."""
        with self.lock:
            while self._work():
                pass

    def work_a_little(self) -> None:
        self.check()
        if self._awake.is_set():
            with self.lock:
                self._work()

    def work_until(self, event: LateEvent) -> None:
        assert self._awake.wait(WAIT_S)
        self.check()
        with self.lock:
            while not event.reached:
                assert self._work(), "a stream waits for ever"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= begin and end <= at + size for at, size in self.registered.items())

    def _work(self) -> bool:
        """Do one piece of work of the stream whose turn it is; False: none can go on."""
        streams = self._streams[:: 1 if self._order == "training first" else -1]
        if self._order == "at random":
            self._random.shuffle(streams)
        for stream in streams:
            while stream.todo and getattr(stream.todo[0], "reached", False):
                stream.todo.popleft()
            if stream.todo and not isinstance(stream.todo[0], LateEvent):
                stream.todo.popleft()()
                return True
        return False

    def _queue_copy(self, stream: LateStream, target: torch.Tensor, source: torch.Tensor) -> None:
        host = source if self._holds(target) else target
        place = (host.data_ptr(), host.data_ptr() + host.nbytes)
        into, out_of = self._raw(target), self._raw(source)
        self._flying.append(place)

        def work() -> None:
            into.copy_(out_of)
            self._flying.remove(place)

        stream.todo.append(work)

    def _holds(self, tensor: torch.Tensor) -> bool:
        begin = self._memory.data_ptr()
        place = tensor.untyped_storage().data_ptr()  # a tensor of no elements has it, too
        return begin <= place < begin + len(self._array)

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of ``tensor`` as a pointer has it: it keeps nothing on the device."""
        if not self._holds(tensor):
            return tensor.detach()
        place = tensor.untyped_storage().data_ptr() - self._memory.data_ptr()
        offset = place // tensor.itemsize + tensor.storage_offset()
        return self._memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)

    def _scribble(self, begin: int, length_bytes: int) -> None:
        with self.lock:
            self.training.todo.append(
                lambda: self._array[begin : begin + length_bytes].fill(SCRIBBLE)
            )
