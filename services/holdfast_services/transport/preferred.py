"""Several transports as one: of the kinds that both sides have the first that works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.inventory import Endpoint
from holdfast.errors import UnavailableError
from holdfast_services.transport import (
    ByteCount,
    Fetch,
    FetchRequest,
    SegmentSource,
    Transport,
    no_way,
)

REST_S = 60.0
"""How long a way that failed, while another worked, is not tried again."""
RESTING_COUNT_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A transport and the kind of its endpoints; ``place`` says where it runs, for people.

    ``served`` is what it counts the bytes in that it gave to peers.
    """

    kind: str
    transport: Transport
    place: str = ""
    served: ByteCount = field(default_factory=ByteCount)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportState:
    """How a kind of transport fares: what came over it, and its last problem, if any."""

    kind: str
    place: str = ""
    fetched_bytes: int = 0
    problem: str = ""


class Preferred:
    """Serves over all ``ways``; fetches over the first that the peer has, or else the next.

    Args:
        ways: In order of preference.
        unused: A kind that would come first, and why it is not there.
    """

    def __init__(self, ways: Sequence[Way], unused: TransportState | None = None) -> None:
        self._ways = tuple(ways)
        self._unused = unused
        self.on_fallback: Callable[[str], None] = lambda _: None
        """Told why, in a fetching thread, when a fetch went over another way than the first."""
        self._guard = threading.Lock()
        self._fetched_bytes = dict.fromkeys((way.kind for way in ways), 0)
        self._problems: dict[str, str] = {}
        self._resting_until_s: dict[Endpoint, float] = {}

    def states(self) -> tuple[TransportState, ...]:
        """Return how all kinds fare, the unused one first."""
        with self._guard:
            found = tuple(
                TransportState(
                    kind=way.kind,
                    place=way.place,
                    fetched_bytes=self._fetched_bytes[way.kind],
                    problem=self._problems.get(way.kind, ""),
                )
                for way in self._ways
            )
        return (self._unused, *found) if self._unused is not None else found

    def served_bytes(self) -> dict[str, int]:
        """Return how much peers were given over each kind that is used."""
        return {way.kind: way.served.total_bytes for way in self._ways}

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; return the endpoints of all ways."""
        return tuple(one for way in self._ways for one in way.transport.serve(source))

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination; see ``Transport.fetch``.

        Only a way that cannot be used leads to the next: a source without the bytes, or with bad
        ones, has them over no other way either. Parts that came stay.
        """
        ways = self._usable(endpoints)
        left: list[tuple[Way, Endpoint, UnavailableError]] = []
        for way, endpoint in ways:
            before = set(fetch.done)
            try:
                way.transport.fetch((endpoint,), fetch)
            except UnavailableError as error:
                if (way, endpoint) == ways[-1]:
                    raise
                left.append((way, endpoint, error))
            else:
                for each in left:
                    self._leave(*each, instead=way)
                return
            finally:
                self._count(way, fetch.request, fetch.done - before)

    def _usable(self, endpoints: Sequence[Endpoint]) -> list[tuple[Way, Endpoint]]:
        """Return the ways to a peer in order; those that rest only if there is no other."""
        # Of a kind the first, as ``address_of``: a peer says how many, and each takes time.
        places = {endpoint.kind: endpoint for endpoint in reversed(endpoints)}
        found = [(way, places[way.kind]) for way in self._ways if way.kind in places]
        if not found:
            raise no_way([way.kind for way in self._ways], endpoints)
        now_s = time.monotonic()
        with self._guard:
            awake = [one for one in found if self._resting_until_s.get(one[1], 0.0) <= now_s]
        return awake or found

    def _leave(
        self, way: Way, endpoint: Endpoint, error: UnavailableError, *, instead: Way
    ) -> None:
        now_s = time.monotonic()
        why = f"{endpoint} is left for {instead.kind} for {REST_S:.0f} s: {error}"
        with self._guard:
            self._problems[way.kind] = why
            if len(self._resting_until_s) >= RESTING_COUNT_MAX:
                self._resting_until_s.clear()
            self._resting_until_s[endpoint] = now_s + REST_S
        self.on_fallback(why)

    def _count(self, way: Way, request: FetchRequest, came: set[int]) -> None:
        lengths = (end - begin for begin, end in map(request.part, came))
        with self._guard:
            self._fetched_bytes[way.kind] += sum(lengths)

    def revoke(self, view: memoryview) -> None:
        """Have no peer read this memory any more over any way; see ``Transport.revoke``."""
        for way in self._ways:
            way.transport.revoke(view)

    def close(self) -> None:
        """Stop serving over all ways."""
        for way in self._ways:
            way.transport.close()
