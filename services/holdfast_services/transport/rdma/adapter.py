"""The ports in use, each with its memory; of several the one with the fewest queue pairs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ipaddress import IPv6Address

from holdfast.errors import UnavailableError
from holdfast_services.transport.rdma import neighbours
from holdfast_services.transport.rdma.frames import Greeting
from holdfast_services.transport.rdma.ports import LinkLayer, Place, reachable, same_network
from holdfast_services.transport.rdma.registered import RegisteredMemory
from holdfast_services.transport.rdma.verbs import Card, Queue

SERVED_DEPTH = 1
"""Requests of a server at a time: it binds one window after the other."""


class Adapter:
    """A port in use; ``queues_count`` says how busy it is."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._card = Card(place)
        self.memory = RegisteredMemory(self._card)
        self.queues_count = 0
        self._guard = threading.Lock()

    def open_queue(self, depth: int) -> Queue:
        """Return a queue pair; ``close_queue`` ends it.

        Raises:
            UnavailableError: the device has none left.
        """
        queue = self._card.queue(depth)
        with self._guard:
            self.queues_count += 1
        return queue

    def close_queue(self, queue: Queue) -> None:
        """End a queue pair of this port: its card touches no memory for it any more."""
        with self._guard:
            self.queues_count -= 1
        queue.close()

    def connected(self, theirs: Greeting) -> Queue:
        """Return the counterpart of a peer's queue pair; ``close_queue`` ends it.

        Raises:
            UnavailableError: the device has none left, or there is no way to the peer's.
        """
        queue = self.open_queue(SERVED_DEPTH)
        try:
            self.connect(queue, theirs)
        except UnavailableError:
            self.close_queue(queue)
            raise
        return queue

    def connect(self, queue: Queue, theirs: Greeting) -> None:
        """Make a queue pair of this port the counterpart of a peer's.

        Raises:
            UnavailableError: there is no way from here to the peer's.
        """
        if theirs.link_layer == LinkLayer.ETHERNET:
            neighbours.find(self.place.gid.address, theirs.gid)
        queue.connect(theirs)


def least_busy(adapters: Sequence[Adapter], link_layer: LinkLayer, gid: IPv6Address) -> Adapter:
    """Return the port to use with a peer's: of its network first, then the least busy.

    Raises:
        UnavailableError: none is on the peer's fabric.
    """
    found = [one for one in adapters if reachable(one.place, link_layer, gid)]
    if not found:
        raise UnavailableError(f"no RDMA port here is on the fabric of {gid}")
    return min(
        found, key=lambda one: (not same_network(one.place.gid.address, gid), one.queues_count)
    )
