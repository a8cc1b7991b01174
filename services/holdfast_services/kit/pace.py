"""A byte rate for several threads: the pure bucket with a clock and a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.core.byte_rate import Bucket, take
from holdfast.errors import StoppedError


class Pace:
    """Lets ``rate_bytes_per_s`` through, over all threads; 0 lets everything through."""

    def __init__(self, rate_bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._clock = clock
        self._guard = threading.Lock()
        self._bucket = (
            Bucket(rate_bytes_per_s=rate_bytes_per_s, at_s=clock()) if rate_bytes_per_s else None
        )

    def promise(self, length_bytes: int) -> float:
        """Promise ``length_bytes`` to the caller; return the seconds until they may be moved."""
        with self._guard:
            if self._bucket is None:
                return 0.0
            self._bucket, wait_s = take(self._bucket, length_bytes, self._clock())
        return wait_s

    def take(self, length_bytes: int, stop: threading.Event) -> None:
        """Return when ``length_bytes`` may be moved.

        Raises:
            StoppedError: ``stop`` was set meanwhile.
        """
        if self.rate_bytes_per_s and stop.wait(self.promise(length_bytes)):
            raise StoppedError("waiting for the byte rate was interrupted")
