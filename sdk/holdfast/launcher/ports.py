"""A port that is free for the next round: bound here without listening, so nobody else gets it."""

from __future__ import annotations

import socket


class HeldPort:
    """A port of all addresses of this node; ``number``. Rank 0 may listen on it meanwhile.

    Two sockets may be bound to one port as long as both say ``SO_REUSEADDR``, as torch's store
    does, or ``SO_REUSEPORT``, and one of them listens at most.
    """

    def __init__(self) -> None:
        family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
        try:
            self._socket = self._bound(family)
        except OSError:  # a kernel without IPv6
            self._socket = self._bound(socket.AF_INET)
        self.number = int(self._socket.getsockname()[1])

    @staticmethod
    def _bound(family: socket.AddressFamily) -> socket.socket:
        bound = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("", 0))
        return bound

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()
