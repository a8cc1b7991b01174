"""The copier of one accelerator: copies on a stream of their own, beside training's.

The host queues and never waits for bytes. Order is made on the device: the copies wait for an
event of the stream that training used when the save began, and whoever writes the sources next has
its own stream wait for an event of the copies. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from holdfast.copying.port import Device, Event, Stream

IN_FLIGHT_BYTES_MAX = 256 << 20
"""Queued and not done: enough to keep the bus busy, little enough to be given up soon."""
POLL_S = 0.001


class Flight:
    """Copies of one device that are under way, of at most ``bytes_max`` until ``hurry``."""

    def __init__(self, device: Device, bytes_max: int = IN_FLIGHT_BYTES_MAX) -> None:
        self._device = device
        self._bytes_max = bytes_max
        self._queued: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._hurried = threading.Event()

    @property
    def under_way(self) -> bool:
        """Whether a copy was queued of which nobody knows yet that it has ended."""
        return bool(self._queued)

    def copy(
        self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue copies on ``stream``; waits for none."""
        if not targets:
            return
        try:
            self._device.copy(stream, targets, sources)
        finally:  # also of copies of which only some were queued
            size = sum([target.nbytes for target in targets])
            self._queued.append((self._device.record(stream), size))
            self._bytes += size

    def make_room(self, size: int) -> None:
        """Wait until ``size`` more may be queued; ``hurry`` ends the wait."""
        while self._queued and self._bytes + size > self._bytes_max:
            if self._queued[0][0].query():
                self._landed()
            elif self._hurried.wait(POLL_S):
                return

    def hurry(self, *, on: bool = True) -> None:
        """Lift the bound, or set it again."""
        if on:
            self._hurried.set()
        else:
            self._hurried.clear()

    def land(self) -> None:
        """Wait until nothing is under way; after an error nothing is, either."""
        try:
            while self._queued:
                self._queued[0][0].synchronize()
                self._landed()
        except RuntimeError:
            self._queued.clear()
            self._bytes = 0
            raise

    def _landed(self) -> None:
        self._bytes -= self._queued.popleft()[1]


class StreamCopier:
    """The ``Copier`` of one accelerator.

    ``bytes_max`` bounds what ``later`` has under way, until ``hurry``.
    """

    def __init__(self, device: Device, bytes_max: int = IN_FLIGHT_BYTES_MAX) -> None:
        self._device = device
        self._side = device.new_stream()
        self._flight = Flight(device, bytes_max)

    @property
    def under_way(self) -> bool:
        """See ``Copier.under_way``."""
        return self._flight.under_way

    def now(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``Copier.now``: on the stream of this thread, so that what it queues next waits."""
        self._flight.copy(self._device.current_stream(), targets, sources)

    def mark(self) -> None:
        """See ``Copier.mark``."""
        self._flight.hurry(on=False)
        self._side.wait_event(self._device.record(self._device.current_stream()))

    def later(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``Copier.later``."""
        self._flight.make_room(sum([target.nbytes for target in targets]))
        self._flight.copy(self._side, targets, sources)

    def hurry(self) -> None:
        """See ``Copier.hurry``."""
        self._flight.hurry()

    def hold(self) -> None:
        """See ``Copier.hold``."""
        self._device.current_stream().wait_event(self._device.record(self._side))

    def land(self) -> None:
        """See ``Copier.land``."""
        self._flight.land()

    def answers(self) -> str:
        """Return why the device does not answer any more; empty: it does."""
        try:
            self._device.record(self._side).synchronize()
        except RuntimeError as cause:
            return f"{self._device.name} does not answer any more: {cause}"
        return ""
