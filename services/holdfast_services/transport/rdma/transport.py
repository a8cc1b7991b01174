"""The transport over RDMA as one implementation of the port."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv6Address
from pathlib import Path

from holdfast.core.inventory import Endpoint
from holdfast.errors import UnavailableError
from holdfast_services.transport import ByteCount, Fetch, Job, SegmentSource, address_of
from holdfast_services.transport.rdma import verbs
from holdfast_services.transport.rdma.adapter import Adapter
from holdfast_services.transport.rdma.client import Lanes
from holdfast_services.transport.rdma.ports import Place, memlock_shortage, usable_places
from holdfast_services.transport.rdma.server import RdmaServer

KIND = "rdma"
"""Of its endpoints; their addresses are ``host:port`` of the control connection."""
_CAP_IPC_LOCK = 1 << 14


def find_places(names: Collection[str], registered_bytes: int) -> list[Place]:
    """Return the ports that this process can use.

    Args:
        names: Of devices; none: all that there are.
        registered_bytes: Most memory that will be registered at each.

    Raises:
        NotFoundError: this machine has no RDMA device.
        UnavailableError: it has, and none can be used; says why, and what to do.
    """
    places = usable_places(verbs.ports(), names, _is_ours)
    shortage = memlock_shortage(_memlock_limit_bytes(), registered_bytes, len(places))
    if shortage:
        raise UnavailableError(shortage)
    return places


def _is_ours(address: IPv6Address) -> bool:
    """Tell whether this host, in this network namespace, has the address."""
    family, host = (
        (socket.AF_INET, str(address.ipv4_mapped))
        if address.ipv4_mapped
        else (socket.AF_INET6, str(address))
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((host, 0))
    except OSError:
        return False
    return True


def _memlock_limit_bytes() -> int | None:
    """Return how much memory this process may lock; None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = re.search(
        r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    free = found is not None and bool(int(found[1], 16) & _CAP_IPC_LOCK)
    return None if free or soft == resource.RLIM_INFINITY else soft


class RdmaTransport:
    """Serves and fetches over the ports at ``places``; ``host:port`` is for control connections.

    ``served`` counts the bytes that peers were lent and have read.
    """

    def __init__(self, places: Sequence[Place], host: str = "127.0.0.1", port: int = 0) -> None:
        """Open the devices.

        Raises:
            UnavailableError: one of them cannot be opened.
        """
        self._host = host
        self._port = port
        self._adapters = [Adapter(place) for place in places]
        self._lanes = Lanes(self._adapters)
        self._server: RdmaServer | None = None
        self.served = ByteCount()

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; return the one endpoint."""
        self._server = RdmaServer(self._host, self._port, source, self._adapters, self.served)
        return (Endpoint(kind=KIND, address=f"{self._host}:{self._server.port}"),)

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination; see ``Transport.fetch``."""
        self._lanes.fetch(Job(address_of(KIND, endpoints), fetch))

    def revoke(self, view: memoryview) -> None:
        """Have no peer read anything of this memory; see ``Transport.revoke``."""
        for adapter in self._adapters:
            adapter.memory.revoke(view)

    def close(self) -> None:
        """Stop serving, end the queue pairs that no fetch uses; it may serve again.

        Devices stay open, and memory registered, for as long as this and the mappings live.
        """
        self._lanes.close()
        if self._server is not None:
            self._server.close()
            self._server = None
