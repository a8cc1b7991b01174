"""A network card in Python, in place of ``verbs.Card``: READs by copying within this process.

It refuses what a real one refuses: a key that no bound window has, bytes outside of the window, and
whatever is asked after an error. Only memory that is registered is written.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from holdfast.errors import UnavailableError
from holdfast_services.transport.rdma.frames import Greeting
from holdfast_services.transport.rdma.ports import Gid, LinkLayer, Place, Port
from holdfast_services.transport.rdma.verbs import ACCESS_REFUSED, Completion

_numbers = itertools.count(1)
bound: dict[int, Window] = {}
"""The windows that are bound, by key, of all cards: one fabric."""


def soft_place(device: str = "soft0") -> Place:
    """Return a port of a card that is reached at the loopback address."""
    gid = Gid(index=0, address=IPv6Address("::ffff:127.0.0.1"), roce_v2=True)
    port = Port(
        device=device, number=1, active=True, link_layer=LinkLayer.ETHERNET, lid=0, mtu=5,
        message_bytes_max=1 << 20, reads_count_max=16, windows=True, gids=(gid,),
    )  # fmt: skip
    return Place(port=port, gid=gid)


@dataclass(slots=True)
class Region:
    address: int
    length_bytes: int
    registered: bool = True

    def close(self) -> None:
        self.registered = False


@dataclass(slots=True)
class Window:
    key: int = 0
    begin: int = 0
    end: int = 0

    def close(self) -> None:
        bound.pop(self.key, None)


class Queue:
    """One end of a connection; completions are made at once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.number = next(_numbers)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._completions: list[Completion] = []
        self._failed = False

    def greeting(self) -> Greeting:
        port = self._place.port
        return Greeting(
            link_layer=LinkLayer(port.link_layer), queue_number=self.number, packet_number=1,
            gid=self._place.gid.address, lid=port.lid, mtu=port.mtu,
            reads_count=port.reads_count_max,
        )  # fmt: skip

    def connect(self, theirs: Greeting) -> None:
        assert theirs.queue_number

    def read(self, tag, region, address, length_bytes, *, key, source) -> None:
        struct.pack("<IQIQ", length_bytes, address, key, source)  # as wide as the card's
        window = bound.get(key)
        error = ""
        if self._failed:
            error = "the queue pair is in error"
        elif window is None or not window.begin <= source <= window.end - length_bytes:
            error = ACCESS_REFUSED
        else:
            assert region.registered
            assert 0 <= address - region.address <= region.length_bytes - length_bytes
            ctypes.memmove(address, source, length_bytes)
        self._failed = bool(error)
        self._completions.append(Completion(tag, error))
        os.eventfd_write(self.fd, 1)

    def bind(self, window: Window, region: Region, address: int, length_bytes: int) -> None:
        if self._failed:
            raise UnavailableError("the queue pair is in error")
        assert region.registered
        window.key, window.begin, window.end = next(_numbers), address, address + length_bytes
        bound[window.key] = window

    def acknowledge(self) -> None:
        os.eventfd_read(self.fd)

    def completions(self) -> list[Completion]:
        found, self._completions = self._completions, []
        return found

    def close(self) -> None:
        os.close(self.fd)


class SoftCard:
    """Stands in for ``verbs.Card``."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def register(self, address: int, length_bytes: int) -> Region:
        return Region(address, length_bytes)

    def window(self) -> Window:
        return Window()

    def queue(self, depth: int) -> Queue:
        assert depth
        return Queue(self._place)
