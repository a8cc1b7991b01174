"""The transport over TCP: ``tcp_server`` and ``tcp_client`` as one implementation of the port."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.inventory import Endpoint
from holdfast_services.transport import ByteCount, Fetch, SegmentSource, address_of
from holdfast_services.transport.tcp_client import fetch_from
from holdfast_services.transport.tcp_server import TcpServer

KIND = "tcp"
"""Of its endpoints; their addresses are ``host:port``."""


class TcpTransport:
    """Serves on ``host:port`` (port 0: any) once it is told to; fetches from any TCP endpoint.

    ``served`` counts the bytes that peers were given.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._server: TcpServer | None = None
        self.served = ByteCount()

    def serve(self, source: SegmentSource) -> tuple[Endpoint, ...]:
        """Begin to serve; return the one endpoint."""
        self._server = TcpServer(self._host, self._port, source, self.served)
        return (Endpoint(kind=KIND, address=f"{self._host}:{self._server.port}"),)

    def fetch(self, endpoints: Sequence[Endpoint], fetch: Fetch) -> None:
        """Fill the destination; see ``Transport.fetch``."""
        fetch_from(address_of(KIND, endpoints), fetch)

    def revoke(self, view: memoryview) -> None:
        """Do nothing: this end reads itself, between two look-ups."""

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None
