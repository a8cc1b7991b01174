"""A byte rate for several threads: the pure bucket with a clock and a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import StoppedError
from holdfast_services.persistence.domain.byte_rate import Bucket, take


class Pace:
    """Lets ``rate_bytes_per_s`` through, over all threads; 0 lets everything through."""

    def __init__(self, rate_bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._bucket = (
            Bucket(rate_bytes_per_s=rate_bytes_per_s, at_s=clock()) if rate_bytes_per_s else None
        )

    def take(self, length_bytes: int, stop: threading.Event) -> None:
        """Return when ``length_bytes`` may be moved.

        Raises:
            StoppedError: ``stop`` was set meanwhile.
        """
        with self._guard:
            if self._bucket is None:
                return
            self._bucket, wait_s = take(self._bucket, length_bytes, self._clock())
        if stop.wait(wait_s):
            raise StoppedError("waiting for the byte rate was interrupted")
