"""Copies that were queued on a device and are not done: how much, and for how long.

Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from holdfast.copying.port import Device, Event, Stream
from holdfast.errors import UnavailableError

IN_FLIGHT_BYTES_MAX = 256 << 20
"""Queued and not done: enough to keep the bus busy, little enough to be given up soon."""
POLL_S = 0.001


class Flight:
    """Copies of one device that are under way, of at most ``bytes_max`` until ``hurry``.

    One that takes longer than ``stalled_s_max`` is waited for no more.

    Once hurried, copies get no events of their own: CUDA's driver holds up who queues some 60 of
    these among copies until the first of them are reached, and nobody waits for them then.
    """

    def __init__(
        self,
        device: Device,
        bytes_max: int = IN_FLIGHT_BYTES_MAX,
        stalled_s_max: float = math.inf,
    ) -> None:
        self._device = device
        self._bytes_max = bytes_max
        self._queued: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._unmarked: Stream | None = None
        self._unmarked_bytes = 0
        self._stalled_s_max = stalled_s_max
        self._hurried = threading.Event()

    @property
    def under_way(self) -> bool:
        """Whether a copy was queued of which nobody knows yet that it has ended."""
        return bool(self._queued or self._unmarked)

    def copy(
        self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue copies on ``stream``; waits for none."""
        if not targets:
            return
        if self._unmarked is not stream:
            self.mark()
        try:
            self._device.copy(stream, targets, sources)
        finally:  # also of copies of which only some were queued
            size = sum([target.nbytes for target in targets])
            self._unmarked = stream
            self._unmarked_bytes += size
            self._bytes += size
            if not self._hurried.is_set():
                self.mark()

    def mark(self) -> None:
        """Have an event for what was queued without one, so that nothing after it is waited for."""
        if self._unmarked is not None:
            self._queued.append((self._device.record(self._unmarked), self._unmarked_bytes))
            self._unmarked, self._unmarked_bytes = None, 0

    def make_room(self, size: int) -> None:
        """Wait until ``size`` more may be queued; ``hurry`` ends the wait.

        Raises:
            UnavailableError: a copy stalls.
        """
        while self._queued and self._bytes + size > self._bytes_max:
            if not self._wait_for_first(self._hurried):
                return

    def hurry(self, *, on: bool = True) -> None:
        """Lift the bound, or set it again."""
        if on:
            self._hurried.set()
        else:
            self._hurried.clear()

    def land(self) -> None:
        """Wait until nothing is under way; after a ``RuntimeError`` nothing is, either.

        Raises:
            UnavailableError: a copy stalls.
        """
        try:
            self.mark()
            while self._queued:
                if self._stalled_s_max < math.inf:
                    self._wait_for_first(threading.Event())
                    continue
                self._queued[0][0].synchronize()  # takes no core, and has no bound
                self._landed()
        except RuntimeError:
            self._queued.clear()
            self._unmarked, self._unmarked_bytes, self._bytes = None, 0, 0
            raise

    def _wait_for_first(self, ends: threading.Event) -> bool:
        """Look until the oldest copy is done; False: ``ends`` was set before."""
        deadline = time.monotonic() + self._stalled_s_max
        while not self._queued[0][0].query():
            if ends.wait(POLL_S):
                return False
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self._device.name} has not done a copy of {self._queued[0][1]} bytes in "
                    f"{self._stalled_s_max:g} s"
                )
        self._landed()
        return True

    def _landed(self) -> None:
        self._bytes -= self._queued.popleft()[1]
