"""Both ends of a fetch over RDMA, on a card in software: what peers may do and say."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest
from tests import soft_card
from tests.rdma.segments import KEY as SHARD
from tests.rdma.segments import SLOT, mapped_segment, request_for, serving
from tests.soft_card import Queue, SoftCard, soft_place

from holdfast.core.inventory import Endpoint
from holdfast.errors import InvalidRequestError, NotFoundError, StoppedError, UnavailableError
from holdfast_services.transport import Fetch, connection, wire
from holdfast_services.transport.rdma import adapter, client, frames, neighbours
from holdfast_services.transport.rdma.flow import PARTS_COUNT_MAX
from holdfast_services.transport.rdma.lane import Lane
from holdfast_services.transport.rdma.transport import KIND, RdmaTransport

WAIT_S = 30.0
KEY = 0xDEAD


@pytest.fixture(autouse=True)
def _soft(monkeypatch):
    monkeypatch.setattr(adapter, "Card", SoftCard)
    soft_card.bound.clear()


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
    near.fetch(endpoints, Fetch(request_for(memory), memoryview(target), done=done))
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


class Unplugged(SoftCard):
    """A card whose port leads nowhere."""

    def queue(self, depth):
        queue = super().queue(depth)
        if self._place.port.device == "unplugged":
            queue.connect = self._nowhere
        return queue

    def _nowhere(self, _):
        raise UnavailableError("no way from here")


def test_a_port_that_leads_nowhere_is_passed_over_for_another(transport, monkeypatch):
    """Else it is the least busy for ever, and all bytes travel over TCP."""
    monkeypatch.setattr(adapter, "Card", Unplugged)
    far, memory = transport(), mapped_segment(2)
    near = transport("unplugged", "soft0")
    endpoints = far.serve(serving(memory))

    assert memory[:] == fetch(near, endpoints, memory)[:]
    assert [0, 1] == [one.queues_count for one in near._adapters]
    with pytest.raises(UnavailableError, match="no way from here"):
        fetch(transport("unplugged"), endpoints, memory)


def test_a_greeting_may_come_late(transport, monkeypatch):
    """The holder looks for the way to here first, as long as a connection may take, or longer."""
    monkeypatch.setattr(connection, "CONNECT_S_MAX", 0.1)
    far, memory = transport(), mapped_segment(1)

    def find(*_):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)

    monkeypatch.setattr(neighbours, "find", find)
    assert memory[:] == fetch(transport(), far.serve(serving(memory)), memory)[:]


def test_a_peer_that_does_not_greet_is_interrupted(transport):
    """F58: shutdown does not wait for a peer that hangs."""
    stop, memory = threading.Event(), mapped_segment(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def accept():
            held, _ = silent.accept()
            with held:
                held.recv(frames.GREETING.size, socket.MSG_WAITALL)
                stop.set()
                held.recv(1)

        asked = threading.Thread(target=accept)
        asked.start()
        endpoints = (Endpoint(kind=KIND, address=f"127.0.0.1:{silent.getsockname()[1]}"),)
        target = memoryview(mmap.mmap(-1, len(memory)))
        with pytest.raises(StoppedError):
            transport().fetch(endpoints, Fetch(request_for(memory), target, stop=stop))
        asked.join(WAIT_S)


def test_a_slot_withdrawn_after_the_look_up_and_before_the_loan_is_not_lent(transport, monkeypatch):
    """A3: nobody would call in what was lent after its memory was revoked."""
    far, memory = transport(), mapped_segment(1)
    served = serving(memory, far.revoke)
    bind = Queue.bind

    def withdrawn_meanwhile(queue, *words):
        served.withdraw(SLOT)
        memory[:] = bytes(len(memory))
        bind(queue, *words)

    monkeypatch.setattr(Queue, "bind", withdrawn_meanwhile)
    read = []
    monkeypatch.setattr(Queue, "read", lambda *_, **__: read.append(1))
    with pytest.raises(NotFoundError):
        fetch(transport(), far.serve(served), mapped_segment(1))
    assert [] == read
    assert {} == soft_card.bound


@pytest.mark.parametrize("over", [0, 1])
def test_bytes_past_the_end_are_refused_and_not_cut_short(transport, over):
    far, memory = transport(), mapped_segment(1)
    wanted = replace(request_for(memory), length_bytes=len(memory) + over)
    target = memoryview(mmap.mmap(-1, len(memory) + over))
    raises = pytest.raises(InvalidRequestError) if over else nullcontext()
    with raises:
        transport().fetch(far.serve(serving(memory)), Fetch(wanted, target))


@pytest.fixture
def by_hand(transport):
    """A lane to a peer that serves a segment; returns (lane, what is served)."""
    far = transport()
    served = serving(mapped_segment(2), far.revoke)
    [endpoint] = far.serve(served)
    made = Lane(
        endpoint.address, connection.connect(endpoint.address), transport()._adapters[0], raises_not
    )
    yield made, served
    made.close()


def raises_not():
    """Nobody stops these."""


LOOK_UP = wire.encode_request(
    wire.PartRequest(key=SHARD, incarnation=SLOT.incarnation, begin=0, length_bytes=5000)
)


def asked(lane, count):
    lane.send(count * LOOK_UP)
    return [frames.LENT.unpack(lane.receive(frames.LENT.size, raises_not)) for _ in range(count)]


def test_a_peer_is_lent_no_more_than_may_be_under_way(by_hand):
    lane, _ = by_hand
    statuses = [status for status, *_ in asked(lane, PARTS_COUNT_MAX + 1)]

    assert [*[wire.Status.OK] * PARTS_COUNT_MAX, wire.Status.INVALID] == statuses


def test_what_is_given_back_is_lent_no_more(by_hand):
    lane, _ = by_hand
    [[_, key, _]] = asked(lane, 1)
    assert key in soft_card.bound
    lane.send(frames.DONE)
    lane.receive(wire.TRAILER.size, raises_not)

    assert {} == soft_card.bound


def test_what_is_withdrawn_is_called_in(by_hand):
    lane, served = by_hand
    asked(lane, 2)
    assert 2 == len(soft_card.bound)
    served.withdraw(SLOT)

    assert {} == soft_card.bound


def test_what_a_peer_had_when_it_hangs_up_is_called_in(by_hand):
    lane, _ = by_hand
    asked(lane, 2)
    lane.connection.shutdown(socket.SHUT_WR)
    with pytest.raises(UnavailableError, match="broke off"):
        lane.receive(1, raises_not)

    assert {} == soft_card.bound


def test_a_lane_is_used_again_unless_the_peer_has_closed_it(transport):
    far, near, memory = transport(), transport(), mapped_segment(1)
    endpoints = far.serve(serving(memory))
    made = []
    new = near._lanes._new
    near._lanes._new = lambda *words: made.append(1) or new(*words)
    for _ in range(2):
        fetch(near, endpoints, memory)
    assert 1 == len(made)

    [lane] = near._lanes._kept
    lane.connection.shutdown(socket.SHUT_RDWR)
    fetch(near, endpoints, memory)
    assert 2 == len(made)
    assert 1 == near._adapters[0].queues_count


def test_no_more_lanes_are_kept_than_there_is_room_for(transport, monkeypatch):
    monkeypatch.setattr(client, "KEPT_COUNT_MAX", 2)
    near, memory = transport(), mapped_segment(1)
    for _ in range(4):
        fetch(near, transport().serve(serving(memory)), memory)

    assert 2 == near._adapters[0].queues_count


@pytest.mark.usefixtures("_deaf_card")
def test_a_card_that_says_nothing_is_given_up(transport, monkeypatch):
    """However long the fetch may take as a whole."""
    monkeypatch.setattr(client, "SILENCE_S_MAX", 0.1)
    far, memory = transport(), mapped_segment(1)
    with pytest.raises(UnavailableError, match="is silent"):
        fetch(transport(), far.serve(serving(memory)), memory)
