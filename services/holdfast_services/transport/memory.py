"""A transport within one process, for tests: the same promises, no sockets.

Addresses are names in a ``MemoryNetwork``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.inventory import Endpoint
from holdfast.errors import DigestMismatchError, NotFoundError, StoppedError, UnavailableError
from holdfast.format.digest import part_digest
from holdfast_services.transport import (
    Fetch,
    SegmentSource,
    address_of,
    reused,
)

KIND = "memory"


@dataclass
class MemoryNetwork:
    """The servers by address."""

    sources: dict[str, SegmentSource] = field(default_factory=dict)


class MemoryTransport:
    """One node's end in a ``MemoryNetwork``."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; return the one endpoint."""
        self._network.sources[self._address] = source
        return (Endpoint(kind=KIND, address=self._address),)

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination; see ``Transport.fetch``."""
        address = address_of(KIND, endpoints)
        request = fetch.request
        for index in fetch.missing:
            if fetch.stop.is_set():
                raise StoppedError(f"fetch of {request.key} was interrupted")
            for _ in range(2):
                self._copy(address, fetch, index)
                begin, end = request.part(index)
                if part_digest(fetch.destination[begin:end]) == request.digests[index]:
                    fetch.done.add(index)
                    break
            else:
                raise DigestMismatchError(f"part {index} of {request.key} does not match")

    def _copy(self, address: str, fetch: Fetch, index: int) -> None:
        request = fetch.request
        source = self._network.sources.get(address)
        if source is None:
            raise UnavailableError(f"no server listens at {address}")
        begin, end = request.part(index)
        view = source.lookup(request.key, request.incarnation)
        first, last = request.offset_bytes + begin, request.offset_bytes + end
        if view is not None and last > len(view):
            raise UnavailableError(f"{address} has {len(view)} bytes, not {last}")
        if view is not None:
            fetch.destination[begin:end] = view[first:last]
        if view is None or reused(view, source.lookup(request.key, request.incarnation)):
            raise NotFoundError(f"{address} no longer has {request.key}")

    def revoke(self, view: memoryview) -> None:
        """Do nothing: this end reads itself, between two look-ups."""

    def close(self) -> None:
        """Stop serving."""
        self._network.sources.pop(self._address, None)
