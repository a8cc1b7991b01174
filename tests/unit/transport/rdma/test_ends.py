"""Both ends of a fetch over RDMA, on a card in software: what peers may do and say."""

from __future__ import annotations

import mmap
import socket
import threading
from contextlib import closing

import pytest
from tests.rdma.segments import mapped_segment, request_for
from tests.soft_card import Queue, SoftCard, soft_place

from holdfast.core.inventory import Endpoint
from holdfast.errors import UnavailableError
from holdfast_services.transport import wire
from holdfast_services.transport.rdma import adapter, frames
from holdfast_services.transport.rdma.transport import KIND, RdmaTransport

WAIT_S = 30.0
KEY = 0xDEAD


@pytest.fixture(autouse=True)
def _soft(monkeypatch):
    monkeypatch.setattr(adapter, "Card", SoftCard)


@pytest.fixture
def transport():
    """Make transports; all are closed at the end."""
    made = []

    def make(*devices):
        places = [soft_place(device) for device in devices or ("soft0",)]
        made.append(RdmaTransport(places, "127.0.0.1"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fetch(near, endpoints, memory, done=None):
    target = mmap.mmap(-1, len(memory))
    done = set() if done is None else done
    near.fetch(
        endpoints, request_for(memory), memoryview(target), done=done, stop=threading.Event()
    )
    return target


@pytest.fixture
def peer():
    """Serve one connection by a function, which greets first; returns its endpoints."""
    started = []

    def start(serve):
        listener = socket.create_server(("127.0.0.1", 0))

        queue = SoftCard(soft_place()).queue(1)

        def run():
            with closing(queue), listener, listener.accept()[0] as connection:
                connection.settimeout(WAIT_S)
                connection.recv(frames.GREETING.size, socket.MSG_WAITALL)
                connection.sendall(frames.encode_greeting(queue.greeting()))
                serve(connection)

        started.append(threading.Thread(target=run))
        started[-1].start()
        return (Endpoint(kind=KIND, address=f"127.0.0.1:{listener.getsockname()[1]}"),)

    yield start
    for thread in started:
        thread.join(WAIT_S)


def lent(status=wire.Status.OK, key=KEY, address=1 << 20):
    return frames.LENT.pack(status, key, address)


@pytest.fixture
def _deaf_card(monkeypatch):
    """A card whose READs never complete."""
    monkeypatch.setattr(Queue, "read", lambda *_, **__: None)


@pytest.mark.usefixtures("_deaf_card")
def test_a_peer_that_hangs_up_while_the_card_reads_is_noticed(transport, peer):
    """Not only when RDMA's own retries are exhausted, or its silence is too long."""
    endpoints = peer(lambda connection: connection.sendall(lent()))
    with pytest.raises(UnavailableError, match="broke off"):
        fetch(transport(), endpoints, mapped_segment(1))


@pytest.mark.usefixtures("_deaf_card")
def test_an_answer_that_nobody_asked_for_ends_the_fetch(transport, peer):
    """Left unread it would have the fetch turn round without waiting."""

    def serve(connection):
        connection.sendall(lent() + b"more")
        connection.recv(1 << 12)
        connection.recv(1)

    with pytest.raises(UnavailableError, match="nobody asked for"):
        fetch(transport(), peer(serve), mapped_segment(1))


def test_an_address_that_wraps_around_is_refused(transport, peer):
    """P9: a holder may say any address."""

    def serve(connection):
        connection.sendall(lent(address=(1 << 64) - 1))
        connection.recv(1 << 12)

    with pytest.raises(UnavailableError):
        fetch(transport(), peer(serve), mapped_segment(2))
