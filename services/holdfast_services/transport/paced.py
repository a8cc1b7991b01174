"""Fetches at a byte rate, over any transport: a few parts at a time, each when its turn has come.

The wait is between fetches of the transport beneath: its deadlines count what is on the wire alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.core.byte_rate import BURST_S
from holdfast.core.inventory import Endpoint
from holdfast.errors import StoppedError
from holdfast.format.digest import PART_BYTES
from holdfast_services.kit.pace import Pace
from holdfast_services.transport import Fetch, SegmentSource, Transport

PORTION_PARTS_MAX = 4
"""As many as a fetch over TCP has under way at a time."""


class Paced:
    """A transport whose fetches share one byte rate, unless it is lifted. Serving is not limited.

    Args:
        transport: Moves the bytes; closed with this.
        pace: The rate; 0: there is none.
    """

    def __init__(self, transport: Transport, pace: Pace) -> None:
        self._transport = transport
        self._pace = pace
        parts_count = int(pace.rate_bytes_per_s * BURST_S) // PART_BYTES
        self._parts_count = min(max(parts_count, 1), PORTION_PARTS_MAX)
        self._lifted = threading.Event()
        self.resume()

    def lift(self) -> None:
        """Let all fetches go on as fast as they can, those that wait at once."""
        self._lifted.set()

    def resume(self) -> None:
        """Have the rate kept again, by fetches under way from their next portion on."""
        if self._pace.rate_bytes_per_s:
            self._lifted.clear()
        else:
            self._lifted.set()

    def portions(
        self, missing: Sequence[int], length_bytes: int, stop: threading.Event
    ) -> Iterator[frozenset[int]]:
        """Yield the ``missing`` parts of ``length_bytes``, some at a time, when they may be moved.

        At least once; without a rate, or once it is lifted, all that are left.

        Raises:
            StoppedError: ``stop`` was set, and the rate lifted so that nobody waits for it.
        """
        left = list(missing)
        while True:
            portion = left[: self._parts_count]
            if not (self._lifted.is_set() or stop.is_set()):
                ends = (min((part + 1) * PART_BYTES, length_bytes) for part in portion)
                asked = sum(ends) - sum(portion) * PART_BYTES
                self._lifted.wait(self._pace.promise(asked))
            if stop.is_set():
                raise StoppedError("a fetch was interrupted")
            if self._lifted.is_set():
                portion = left
            yield frozenset(portion)
            left = left[len(portion) :]
            if not left:
                return

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; see ``Transport.serve``."""
        return self._transport.serve(source)

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination at the rate; see ``Transport.fetch``."""
        length_bytes = fetch.request.length_bytes
        for parts in self.portions(fetch.missing, length_bytes, fetch.stop):
            self._transport.fetch(endpoints, replace(fetch, only=parts))

    def revoke(self, view: memoryview) -> None:
        """Have no peer read this memory any more; see ``Transport.revoke``."""
        self._transport.revoke(view)

    def close(self) -> None:
        """Stop serving."""
        self._transport.close()
