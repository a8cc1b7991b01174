"""What goes wrong with cards, cables, peers and slots while bytes are read from afar."""

from __future__ import annotations

import gc
import mmap
import socket
import subprocess
import threading
import time
from dataclasses import replace
from ipaddress import IPv6Address

import pytest
from tests.rdma.segments import KEY, LAST_PART_BYTES, SLOT, mapped_segment, request_for, serving

from holdfast.core.inventory import Endpoint
from holdfast.errors import NotFoundError, UnavailableError
from holdfast_services.transport import Fetch, wire
from holdfast_services.transport.connection import connect
from holdfast_services.transport.rdma import frames, verbs
from holdfast_services.transport.rdma.lane import Lane

WAIT_S = 30.0


def fetch(transport, endpoints, wanted, done=None):
    """Fetch into new memory; return it."""
    target = mmap.mmap(-1, len(wanted))
    done = set() if done is None else done
    request = request_for(wanted)
    transport.fetch(endpoints, Fetch(request, memoryview(target), done=done))
    return target


def until(met):
    ends_s = time.monotonic() + WAIT_S
    while not (value := met()):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    return value


def test_a_peer_that_dies_while_it_is_read_is_unavailable(transport, peer):
    """F58; what came before is whole, and others are read as before."""
    near, far, done = transport(), transport(), set()
    _, endpoints = peer(5, 4, "kill", "-9", "{pid}")
    with pytest.raises(UnavailableError):
        fetch(near, endpoints, mapped_segment(5), done)

    assert done < set(range(5))
    small = mapped_segment(1)
    assert small[:] == fetch(near, far.serve(serving(small, far.revoke)), small)[:]


def test_a_card_that_goes_down_is_unavailable_and_used_again_when_it_is_up(transport, peer):
    """And then all bytes come from the other node. Meanwhile they come over the other card."""
    wanted, near = mapped_segment(3), transport()
    _, endpoints = peer(3, 3, "ip", "link", "set", "cable0", "down")
    _, over_the_other = peer(3, 0, host="10.2.1.2")
    try:
        with pytest.raises(UnavailableError):
            fetch(near, endpoints, wanted)
        assert wanted[:] == fetch(near, over_the_other, wanted)[:]
    finally:
        subprocess.run(["ip", "-n", "B", "link", "set", "cable0", "up"], check=True)

    def again():
        try:
            return fetch(near, endpoints, wanted)
        except UnavailableError:
            return None

    assert wanted[:] == until(again)[:]


def lane_to(endpoint, transport):
    address = endpoint.address
    return Lane(address, connect(address), transport._adapters[0], lambda: None)


class _Reader:
    """One lane, by hand: asks for the first part and reads where it wants."""

    def __init__(self, transport, endpoints):
        [endpoint] = endpoints
        self.lane = lane_to(endpoint, transport)
        self.target = mmap.mmap(-1, LAST_PART_BYTES)
        self.held = self.lane.adapter.memory.hold(memoryview(self.target))
        self.lane.send(
            wire.encode_request(
                wire.PartRequest(
                    key=KEY, incarnation=SLOT.incarnation, begin=0, length_bytes=LAST_PART_BYTES
                )
            )
        )
        status, self.key, self.address = frames.LENT.unpack(self._frame(frames.LENT.size))
        assert wire.Status.OK == status

    def _frame(self, count):
        def come():
            self.lane.wait()
            return self.lane.received(count)

        return until(come)

    def read(self, *, key=0, shift=0):
        """Read 4 KiB with what was lent, changed; return what became of it."""
        self.lane.queue.read(
            1, self.held.region, self.held.address, 4096,
            key=self.key ^ key, source=self.address + shift,
        )  # fmt: skip

        def completed():
            self.lane.wait()
            return self.lane.queue.completions()

        [completion] = until(completed)
        return completion.error

    def give_back(self):
        self.lane.send(frames.DONE)
        [status] = wire.TRAILER.unpack(self._frame(wire.TRAILER.size))
        return status


@pytest.fixture
def reader(transport):
    """A reader of a segment in this process; returns (it, memory, what is served, the server)."""
    far, memory = transport(), mapped_segment(1)
    served = serving(memory, far.revoke)
    made = _Reader(transport(), far.serve(served))
    yield made, memory, served, far
    made.lane.close()


def test_what_is_lent_can_be_read(reader):
    made, memory, *_ = reader

    assert "" == made.read()
    assert memory[:4096] == made.target[:4096]
    assert wire.Status.OK == made.give_back()


@pytest.mark.parametrize(
    "forged",
    [{"key": 1}, {"key": 0x5500}, {"shift": LAST_PART_BYTES - 4095}, {"shift": -1}],
    ids=["another key of the window", "another key", "past the part", "before the part"],
)
def test_a_forged_capability_is_refused_and_the_next_fetch_works(reader, transport, forged):
    made, memory, _, far = reader

    assert verbs.ACCESS_REFUSED == made.read(**forged)
    assert bytes(4096) == made.target[:4096]
    assert memory[:] == fetch(transport(), far.serve(serving(memory, far.revoke)), memory)[:]


def test_a_capability_ends_when_the_part_is_given_back(reader):
    made, *_ = reader
    made.give_back()

    assert verbs.ACCESS_REFUSED == made.read()


def test_a_capability_ends_when_the_slot_is_withdrawn(reader):
    """The slot may be written again from then on."""
    made, memory, served, _ = reader
    served.withdraw(SLOT)
    memory[:4096] = b"x" * 4096

    assert verbs.ACCESS_REFUSED == made.read()
    assert bytes(4096) == made.target[:4096]
    assert wire.Status.NOT_FOUND == made.give_back()


@pytest.mark.parametrize("at", [2, 5])
def test_a_slot_freed_and_reused_while_it_is_read_is_not_found(transport, at):
    """A3: whatever arrived is of nobody; the source is not left for another transport."""
    memory = mapped_segment(4)
    request = request_for(memory)
    near, far = transport(), transport()
    served = serving(memory, far.revoke)

    class Reusing:
        asked = 0

        def lookup(self, key, incarnation):
            self.asked += 1
            if self.asked == at:
                served.withdraw(SLOT)
                memory[:] = bytes(len(memory))
            return served.lookup(key, incarnation)

    target, done = mmap.mmap(-1, len(memory)), set()
    with pytest.raises(NotFoundError):
        near.fetch(
            far.serve(Reusing()),
            Fetch(request, memoryview(target), done=done),
        )
    assert done < set(range(4))


def test_memory_is_registered_once_and_released_with_its_mapping(transport, monkeypatch):
    """A slot that is used again costs nothing; one that is dropped is not pinned any more."""
    registered = []
    register = verbs.Card.register

    def counted(card, address, length_bytes):
        registered.append(address)
        return register(card, address, length_bytes)

    monkeypatch.setattr(verbs.Card, "register", counted)
    near, far, memory = transport(), transport(), mapped_segment(2)
    request, target = request_for(memory), mmap.mmap(-1, len(memory))
    served = serving(memory, far.revoke)
    endpoints = far.serve(served)
    for _ in range(2):
        near.fetch(endpoints, Fetch(request, memoryview(target)))
    kept = [len(adapter.memory._kept) for end in (near, far) for adapter in end._adapters]
    assert 4 == len(set(registered)) == len(registered)
    assert 2 == sum(kept)

    served.withdraw(SLOT)
    near.close()
    far.close()
    del target, memory, request
    gc.collect()
    assert [] == [
        1 for end in (near, far) for adapter in end._adapters for _ in adapter.memory._kept
    ]


def test_of_two_cards_the_less_busy_one_is_taken(transport):
    near, far = transport(), transport()
    endpoints = far.serve(serving(mapped_segment(1), far.revoke))
    lanes = [near._lanes._new(endpoints[0].address, lambda: None) for _ in range(4)]

    assert [2, 2] == [adapter.queues_count for adapter in near._adapters]
    assert [2, 2] == [adapter.queues_count for adapter in far._adapters]
    for lane in lanes:
        lane.close()
    until(lambda: [0, 0] == [adapter.queues_count for adapter in far._adapters])


def test_a_peer_where_no_way_leads_is_refused_before_verbs_wait_for_it(transport, monkeypatch):
    """Verbs would hold the interpreter's lock for a second, and with it the agent's heartbeat."""
    monkeypatch.setattr(verbs.Queue, "connect", lambda *_: pytest.fail("verbs were asked"))
    adapter = transport()._adapters[0]
    queue = adapter.open_queue(1)
    theirs = replace(queue.greeting(), gid=IPv6Address("::ffff:10.2.0.77"))
    with pytest.raises(UnavailableError, match=r"no way from 10\.2\.0\.1 to 10\.2\.0\.77"):
        adapter.connect(queue, theirs)
    adapter.close_queue(queue)


LOOK_UP = wire.encode_request(
    wire.PartRequest(key=KEY, incarnation=SLOT.incarnation, begin=0, length_bytes=LAST_PART_BYTES)
)


@pytest.mark.parametrize(
    "said",
    [b"HFD", b"HFDP", LOOK_UP[:20], bytes(32), frames.DONE, LOOK_UP + 2 * frames.DONE, 5 * LOOK_UP,
     LOOK_UP.replace(b"r1/", b"../")],
    ids=["torn verb", "verb alone", "torn", "no verb", "nothing lent", "done twice",
         "too many", "no shard"],
)  # fmt: skip
def test_nonsense_ends_its_own_connection_and_leaves_nothing_lent(transport, said):
    """P9: whoever connects may say anything."""
    near, far, memory = transport(), transport(), mapped_segment(1)
    [endpoint] = endpoints = far.serve(serving(memory, far.revoke))
    lane = lane_to(endpoint, near)
    lane.send(said)
    lane.connection.shutdown(socket.SHUT_WR)
    until(lambda: [0, 0] == [adapter.queues_count for adapter in far._adapters])
    lane.close()

    assert [{}, {}] == [adapter.memory._lent for adapter in far._adapters]
    assert memory[:] == fetch(near, endpoints, memory)[:]


@pytest.mark.parametrize("said", [b"HFRD", b"x" * 36, bytes(36)], ids=["torn", "text", "zeros"])
def test_who_does_not_greet_is_given_no_queue_pair(transport, said):
    far, memory = transport(), mapped_segment(1)
    [endpoint] = endpoints = far.serve(serving(memory, far.revoke))
    host, _, port = endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(100)

    assert answer in (b"", frames.encode_refusal(wire.Status.REFUSED))
    assert [0, 0] == [adapter.queues_count for adapter in far._adapters]
    assert memory[:] == fetch(transport(), endpoints, memory)[:]


@pytest.mark.parametrize(
    "said", [b"HFRD\x02\x00" + bytes(30), b"HTTP/1.1 400 Bad Request\r\n" * 2], ids=["later", "web"]
)
def test_a_peer_that_greets_otherwise_is_unavailable(transport, said):
    """Of a later version, or something else: it may serve over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            with other.accept()[0] as connection:
                connection.recv(frames.GREETING.size, socket.MSG_WAITALL)
                connection.sendall(said)

        greeting = threading.Thread(target=greet)
        greeting.start()
        endpoints = (Endpoint(kind="rdma", address=f"127.0.0.1:{other.getsockname()[1]}"),)
        with pytest.raises(UnavailableError, match="not a greeting of RDMA, version 1"):
            fetch(transport(), endpoints, mapped_segment(1))
        greeting.join()
