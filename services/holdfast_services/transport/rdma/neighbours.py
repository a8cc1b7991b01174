"""Finds the way to a peer's card before verbs ask for it.

Connecting a queue pair on Ethernet waits in the kernel for the peer's hardware address, up to a
second if nobody has it, and pyverbs holds the interpreter's lock meanwhile. So the kernel is made
to look for it before, by an empty datagram to a port where nobody listens.
"""

from __future__ import annotations

import select
import socket
import time
from ipaddress import IPv6Address
from pathlib import Path

from holdfast.errors import UnavailableError

LOOK_S_MAX = 5.0
"""Longer than the kernel asks for an address: three times, a second apart."""
LOOK_AGAIN_S = 0.05
DISCARD_PORT = 9
TABLE = Path("/proc/net/arp")
_COMPLETE = 0x2
# Of linux/in.h and in6.h: a datagram that finds nobody is an error too, not only one refused.
_RECEIVE_ERRORS = {
    socket.AF_INET: (socket.IPPROTO_IP, 11),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 25),
}


def find(ours: IPv6Address, theirs: IPv6Address) -> None:
    """Return once the kernel knows the way from our address to theirs, or cannot tell.

    Raises:
        UnavailableError: there is none.
    """
    family = socket.AF_INET if theirs.ipv4_mapped else socket.AF_INET6
    own, peer = (str(one.ipv4_mapped or one) for one in (ours, theirs))
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(*_RECEIVE_ERRORS[family], 1)
            probe.bind((own, 0))
            probe.connect((peer, DISCARD_PORT))
            probe.send(b"")
            _wait(probe, peer)
    except ConnectionRefusedError:
        return  # it was there to refuse
    except OSError as cause:
        raise UnavailableError(f"no way from {own} to {peer}: {cause.strerror}") from cause


def _wait(probe: socket.socket, peer: str) -> None:
    """Return when the address is known, or nothing was said; raise what came back."""
    until_s = time.monotonic() + LOOK_S_MAX
    poll = select.poll()
    poll.register(probe, select.POLLIN)
    while time.monotonic() < until_s:
        if poll.poll(int(LOOK_AGAIN_S * 1e3)):
            probe.recv(1)
            return
        if is_known(TABLE.read_text(), peer):
            return


def is_known(table: str, address: str) -> bool:
    """Tell whether the kernel's table of neighbours has an IPv4 address, completely."""
    rows = (line.split() for line in table.splitlines()[1:])
    return any(row[0] == address and int(row[2], 16) & _COMPLETE for row in rows if len(row) > 2)
