"""The transport port: bytes of sealed segments from one node to another. One verb, *fetch*.

Implementations: ``tcp_server`` with ``tcp_client`` (``tcp.TcpTransport``), ``rdma``
(``rdma.transport.RdmaTransport``), and ``memory.MemoryTransport`` for tests. All pass
``tests/contract/test_transport.py``. Blocking: callers run it in threads. Receivers pull, into
memory they own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.inventory import Endpoint
from holdfast.core.slot_names import SlotName
from holdfast.errors import StoppedError, UnavailableError
from holdfast.format.digest import PART_BYTES

FETCH_S_BASE = 10.0
FETCH_BYTES_PER_S_MIN = 50 << 20


def deadline_s(length_bytes: int) -> float:
    """Return how long moving ``length_bytes`` may take before it counts as stuck (F56)."""
    return FETCH_S_BASE + length_bytes / FETCH_BYTES_PER_S_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """What to fetch: a shard by key, in a slot incarnation, with the digests its parts must have.

    All of it, or a window: ``length_bytes`` from ``offset_bytes`` on, which is a multiple of
    ``PART_BYTES``. Parts and the destination are those of the window.

    Invariant: ``len(digests)`` is the number of parts of ``length_bytes``.
    """

    key: str
    incarnation: int
    length_bytes: int
    digests: tuple[bytes, ...]
    offset_bytes: int = 0

    def part(self, index: int) -> tuple[int, int]:
        """Return ``(begin, end)`` of a part in the destination, in bytes."""
        begin = index * PART_BYTES
        return begin, min(begin + PART_BYTES, self.length_bytes)


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch: what is wanted, where it goes, what of it is there, and what ends it.

    ``destination`` is as long as what is requested. Numbers of verified parts are added to
    ``done``, also when it fails: another source gives the rest. With ``only`` no other parts are
    fetched.
    """

    request: FetchRequest
    destination: memoryview
    done: set[int] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)
    only: frozenset[int] | None = None

    @property
    def missing(self) -> list[int]:
        """The parts that are still to come."""
        wanted = range(len(self.request.digests)) if self.only is None else sorted(self.only)
        return [index for index in wanted if index not in self.done]

    @property
    def missing_bytes(self) -> int:
        """The length of ``missing``."""
        return sum(end - begin for begin, end in map(self.request.part, self.missing))


@dataclass(slots=True)
class Job:
    """A fetch from one address, and when it counts as stuck."""

    address: str
    fetch: Fetch
    until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.until_s = time.monotonic() + deadline_s(self.fetch.missing_bytes)

    def check(self) -> None:
        """Raise when this fetch is to end."""
        key = self.fetch.request.key
        if self.fetch.stop.is_set():
            raise StoppedError(f"fetch of {key} was interrupted")
        if time.monotonic() > self.until_s:
            raise UnavailableError(f"{self.address} is too slow with {key}")


class ByteCount:
    """How many bytes there were; counted by several threads, a part at a time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.total_bytes = 0

    def add(self, length_bytes: int) -> None:
        """Count these too."""
        with self._guard:
            self.total_bytes += length_bytes


class SegmentSource(Protocol):
    """What a server serves from."""

    def lookup(self, key: str, incarnation: int) -> memoryview | None:
        """Return the bytes of a sealed shard, None when this incarnation is not here (any more).

        Asked before the first and again after the last byte of each part: a seqlock. Views of
        one memory (``obj``) both times say that it was not reused; another slot may hold the same
        shard in an equal incarnation.
        """
        ...


def reused(before: memoryview, after: memoryview | None) -> bool:
    """Tell by a look-up before and one after whether bytes read between may be of another slot."""
    return after is None or after.obj is not before.obj


def address_of(kind: str, endpoints: Sequence[Endpoint]) -> str:
    """Return where a peer serves over ``kind``; of several places the first.

    Raises:
        UnavailableError: it does not; names the kinds that it serves over.
    """
    for endpoint in endpoints:
        if endpoint.kind == kind:
            return endpoint.address
    raise no_way([kind], endpoints)


def no_way(kinds: Sequence[str], endpoints: Sequence[Endpoint]) -> UnavailableError:
    """Return the error of a peer that serves over none of ``kinds``; names those of both sides."""
    theirs = ", ".join(endpoint.kind for endpoint in endpoints)[:80] or "nothing"
    ours = ", ".join(kinds)
    return UnavailableError(f"serves over {theirs}; this side fetches over {ours} only")


class Transport(Protocol):
    """Serves this node's segments and fetches others'."""

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; return the endpoints that peers fetch from."""
        ...

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination with the parts that are missing, verified one by one.

        They come from one of a peer's ``endpoints``, of a kind that this transport knows.

        Raises:
            NotFoundError: the source does not have this incarnation (any more).
            DigestMismatchError: a part did not match, twice.
            UnavailableError: the source cannot be reached, or has no endpoint of a kind that is
                known here; it broke off, or is too slow.
            StoppedError: ``fetch.stop`` was set.
        """
        ...

    def revoke(self, view: memoryview) -> None:
        """Have no peer read the memory of ``view`` any more; called when it is served no more.

        What a look-up before and after each part cannot tell is only when a peer reads by itself:
        then it is refused from now on.
        """
        ...

    def close(self) -> None:
        """Stop serving; break off what is being served."""
        ...


class ServedSegments:
    """The sealed segments of this node, by key. A SegmentSource that threads may use.

    A segment is withdrawn *before* its slot is reused, so a reader that finds it again after the
    last byte has read what was sealed.

    Args:
        revoke: Told of memory that is served no more, after look-ups do not find it any more.
    """

    def __init__(self, revoke: Callable[[memoryview], None] = lambda _: None) -> None:
        self._segments: dict[str, tuple[SlotName, memoryview]] = {}
        self._revoke = revoke

    def put(self, key: str, name: SlotName, view: memoryview) -> None:
        """Serve the bytes of a slot under ``key``, in place of those of another."""
        before = self._segments.get(key)
        self._segments[key] = (name, view)
        if before is not None and reused(before[1], view):
            self._revoke(before[1])

    def withdraw(self, name: SlotName) -> None:
        """Serve this slot, in this incarnation, no more."""
        for key, (served, view) in list(self._segments.items()):
            if (served.slot, served.incarnation) == (name.slot, name.incarnation):
                del self._segments[key]
                self._revoke(view)

    def lookup(self, key: str, incarnation: int) -> memoryview | None:
        """Return the bytes, None when this incarnation is not served."""
        known = self._segments.get(key)
        return known[1] if known is not None and known[0].incarnation == incarnation else None
