"""How long a backward waits for gradients to be summed up, after its own are all there."""

from __future__ import annotations

import time
from typing import Any

import torch


class SyncClock:
    """From the last bucket's gradients to the last sum over ranks; read one update later."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._ended_s = 0.0
        self._events: tuple[Any, Any] | None = None

    def begin(self, *, cuda: bool) -> None:
        """Note that the gradients of this rank are all there, on its current stream."""
        self._began_s = self._ended_s = time.perf_counter()
        self._events = None
        if cuda:
            make: Any = torch.cuda.Event
            self._events = make(enable_timing=True), make(enable_timing=True)
            self._events[0].record()

    def end(self) -> None:
        """Note that a bucket was summed up, on the current stream; the last one counts."""
        self._ended_s = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Return the wait of the last backward; 0 if a GPU has not come to its end yet."""
        if self._events is None:
            return max(0.0, self._ended_s - self._began_s)
        first, last = self._events
        return max(0.0, float(first.elapsed_time(last)) / 1e3) if last.query() else 0.0
