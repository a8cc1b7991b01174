"""Which ports of which RDMA devices are used, and with which GID. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address

from holdfast.errors import UnavailableError

READS_COUNT_MAX = 16
"""READs that a side serves at a time on one queue pair, where its device can."""
NETWORK_BYTES = 8
"""Of a GID: the subnet of InfiniBand, the network of an IPv6 address."""
MAPPED_NETWORK_BYTES = 15
"""Of a mapped IPv4 address: a network of 256."""


class LinkLayer(IntEnum):
    """As verbs number them."""

    INFINIBAND = 1
    ETHERNET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of a port's table; on Ethernet it is of RoCE v1 or v2."""

    index: int
    address: IPv6Address
    roce_v2: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port as its device describes it.

    ``mtu`` is 1..5 for 256..4096 bytes; ``windows``: the device has memory windows;
    ``reads_count_max``: READs that it serves at a time on one queue pair.
    """

    device: str
    number: int
    active: bool
    link_layer: int
    lid: int
    mtu: int
    message_bytes_max: int
    reads_count_max: int
    windows: bool
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        """Name it for people."""
        return f"{self.device}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A port and the GID by which others reach it."""

    port: Port
    gid: Gid

    def __str__(self) -> str:
        """Name it for people."""
        return f"{self.port} ({readable(self.gid.address)})"


def readable(address: IPv6Address) -> str:
    """Return a GID as people write it: IPv4 where it is mapped."""
    return str(address.ipv4_mapped or address)


def choose_gid(port: Port, ours: Callable[[IPv6Address], bool]) -> Gid:
    """Return the GID to use at a port: of RoCE v2, an address of this host, IPv4 first.

    InfiniBand has its own at index 0. ``ours`` tells whether an address is this host's; a
    device of another network namespace shows GIDs that are not.

    Raises:
        UnavailableError: the port cannot be used; says why, and what to do.
    """
    if not port.active:
        raise UnavailableError(f"{port} is down")
    if not port.windows:
        raise UnavailableError(f"{port} has no memory windows")
    if port.link_layer == LinkLayer.INFINIBAND:
        if port.gids and port.lid:
            return port.gids[0]
        raise UnavailableError(f"{port} has no LID: is a subnet manager running?")
    if port.link_layer != LinkLayer.ETHERNET:
        raise UnavailableError(f"{port} is neither InfiniBand nor Ethernet")
    usable = [
        gid
        for gid in port.gids
        if gid.roce_v2 and not gid.address.is_link_local and ours(gid.address)
    ]
    if not usable:
        raise UnavailableError(
            f"{port} has no GID of RoCE v2 with an address of this host: give its interface an "
            f"IP address"
        )
    return min(usable, key=lambda gid: (gid.address.ipv4_mapped is None, gid.index))


def usable_places(
    ports: Sequence[Port], names: Collection[str], ours: Callable[[IPv6Address], bool]
) -> list[Place]:
    """Return where RDMA can be used: at all ports, or only at those of devices in ``names``.

    Raises:
        UnavailableError: nowhere; says why not of each.
    """
    chosen = [port for port in ports if not names or port.device in names]
    found = {port.device for port in ports}
    reasons = [f"no device {name} to open" for name in names if name not in found]
    places: list[Place] = []
    for port in chosen:
        try:
            places.append(Place(port=port, gid=choose_gid(port, ours)))
        except UnavailableError as error:
            reasons.append(error.message)
    if not places:
        raise UnavailableError("; ".join(reasons) or "no port")
    return places


def same_network(one: IPv6Address, other: IPv6Address) -> bool:
    """Tell whether two addresses are likely of one network: of cards on rails of their own."""
    bytes_count = NETWORK_BYTES if one.ipv4_mapped is None else MAPPED_NETWORK_BYTES
    return one.packed[:bytes_count] == other.packed[:bytes_count]


def reachable(place: Place, link_layer: int, gid: IPv6Address) -> bool:
    """Tell whether a peer's port may be on the same fabric as ``place``."""
    if place.port.link_layer != link_layer:
        return False
    if link_layer == LinkLayer.ETHERNET:
        return True
    return place.gid.address.packed[:NETWORK_BYTES] == gid.packed[:NETWORK_BYTES]


def memlock_shortage(limit_bytes: int | None, budget_bytes: int, ports_count: int) -> str:
    """Say why the memory that may be locked does not suffice; empty: it does.

    All of the budget is registered at each port. ``limit_bytes`` None: no limit holds for this
    process.
    """
    if limit_bytes is None or limit_bytes >= budget_bytes * ports_count:
        return ""
    return (
        f"memlock limit {limit_bytes >> 10} KiB is less than the budget at each port, "
        f"{ports_count} x {budget_bytes >> 10} KiB: ulimit -l unlimited, or LimitMEMLOCK=infinity"
    )
