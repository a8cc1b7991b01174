"""The promises of ``Transport``, one suite over every implementation, the fake included."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
from tests.members import Members
from tests.said import tcp
from tests.soft_card import SoftCard, soft_place

from holdfast.core.inventory import Endpoint
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import DigestMismatchError, NotFoundError, StoppedError, UnavailableError
from holdfast.format import digest
from holdfast.format.digest import PART_BYTES, part_digest, part_ranges
from holdfast.rpc import tls
from holdfast_services.kit.pace import Pace
from holdfast_services.transport import (
    Fetch,
    FetchRequest,
    ServedSegments,
    tcp_client,
)
from holdfast_services.transport.connection import greet, guarded
from holdfast_services.transport.memory import MemoryNetwork, MemoryTransport
from holdfast_services.transport.paced import Paced
from holdfast_services.transport.rdma import adapter
from holdfast_services.transport.rdma.transport import RdmaTransport, find_places
from holdfast_services.transport.tcp import TcpTransport

KEY = "r1/5/1/0/0"
SLOT = SlotName("s1", 4, SlotState.SEALED)
LENGTH = 2 * PART_BYTES + 12_345


def _tcp(_=None):
    return TcpTransport("127.0.0.1"), TcpTransport("127.0.0.1"), tcp("127.0.0.1:1")


def _paced(_):
    pace = Pace(8 * PART_BYTES - 1)  # a part at a time
    return Paced(TcpTransport("127.0.0.1"), pace), TcpTransport("127.0.0.1"), tcp("127.0.0.1:1")


def _memory(_):
    network = MemoryNetwork()
    nowhere = (Endpoint(kind="memory", address="nobody"),)
    return MemoryTransport(network, "near"), MemoryTransport(network, "far"), nowhere


def _rdma(_):
    places = find_places((), 0)
    near, far = (RdmaTransport(places, "127.0.0.1") for _ in range(2))
    return near, far, (Endpoint(kind="rdma", address="127.0.0.1:1"),)


def _soft_rdma(monkeypatch):
    monkeypatch.setattr(adapter, "Card", SoftCard)
    near, far = (RdmaTransport([soft_place()], "127.0.0.1") for _ in range(2))
    return near, far, (Endpoint(kind="rdma", address="127.0.0.1:1"),)


@pytest.fixture(
    params=[
        (_tcp, False),
        (_tcp, True),
        (_paced, False),
        (_memory, False),
        (_soft_rdma, False),
        (_soft_rdma, True),
        pytest.param((_rdma, False), marks=pytest.mark.rdma),
        pytest.param((_rdma, True), marks=pytest.mark.rdma),
    ],
    ids=["tcp", "tcp, TLS", "tcp at a rate", "memory", "rdma in software", "rdma in software, TLS",
         "rdma", "rdma, TLS"],
)  # fmt: skip
def ends(request, monkeypatch, member):
    """(fetching end, serving end, endpoints where nobody serves)."""
    make, secure = request.param
    tls.use(member if secure else None)
    near, far, nowhere = make(monkeypatch)
    yield near, far, nowhere
    near.close()
    far.close()
    tls.use(None)


@pytest.fixture(scope="module")
def member(tmp_path_factory):
    return Members().issue(tmp_path_factory.mktemp("member"))


@pytest.fixture(scope="module")
def segment():
    pattern = bytes(range(256)) * (LENGTH // 256 + 1)
    return bytearray(pattern[:LENGTH])


def request_for(data, *, incarnation=4):
    digests = tuple(part_digest(data[a:b]) for a, b in part_ranges(len(data)))
    return FetchRequest(key=KEY, incarnation=incarnation, length_bytes=len(data), digests=digests)


def serving(data):
    served = ServedSegments()
    served.put(KEY, SLOT, memoryview(data))
    return served


def test_all_bytes_arrive_and_all_parts_are_noted(ends, segment):
    near, far, _ = ends
    endpoints = far.serve(serving(segment))
    target, done = bytearray(LENGTH), set()
    near.fetch(
        endpoints,
        Fetch(request_for(segment), memoryview(target), done=done),
    )
    assert segment == target
    assert {0, 1, 2} == done


def test_parts_that_are_there_are_not_fetched_again(ends, segment):
    near, far, _ = ends
    endpoints = far.serve(serving(segment))
    target = bytearray(LENGTH)
    near.fetch(
        endpoints,
        Fetch(request_for(segment), memoryview(target), done={0, 2}),
    )
    assert bytes(PART_BYTES) == target[:PART_BYTES]
    assert segment[PART_BYTES : 2 * PART_BYTES] == target[PART_BYTES : 2 * PART_BYTES]


def test_a_window_of_a_segment_is_fetched_into_memory_of_its_own_size(ends, segment):
    """What a worker sends part by part never needs more memory than the part."""
    near, far, _ = ends
    endpoints = far.serve(serving(segment))
    window = segment[PART_BYTES:]
    request = replace(request_for(window), offset_bytes=PART_BYTES)
    target, done = bytearray(len(window)), set()
    near.fetch(endpoints, Fetch(request, memoryview(target), done=done))
    assert window == target
    assert {0, 1} == done


def test_another_incarnation_is_not_found(ends, segment):
    """Interleaving 6: gone or changed is NotFound, never a digest mismatch."""
    near, far, _ = ends
    endpoints = far.serve(serving(segment))
    with pytest.raises(NotFoundError):
        near.fetch(
            endpoints,
            Fetch(
                request_for(segment, incarnation=5),
                memoryview(bytearray(LENGTH)),
            ),
        )


def test_a_slot_withdrawn_while_it_is_read_is_not_found(ends, segment):
    """The seqlock: looked up before the first and after the last byte."""

    class Vanishing:
        def __init__(self) -> None:
            self.asked = 0

        def lookup(self, key, incarnation):
            self.asked += 1
            return memoryview(segment) if self.asked == 1 else None

    near, far, _ = ends
    endpoints = far.serve(Vanishing())
    done: set[int] = set()
    with pytest.raises(NotFoundError):
        near.fetch(
            endpoints,
            Fetch(
                request_for(segment[:1000]),
                memoryview(bytearray(1000)),
                done=done,
            ),
        )
    assert set() == done


def test_bytes_that_do_not_match_twice_are_a_mismatch_and_good_parts_stay(ends, segment):
    """P3; the next source gives the rest."""
    near, far, _ = ends
    bad = bytearray(segment)
    bad[-1] ^= 1
    endpoints = far.serve(serving(bad))
    target, done = bytearray(LENGTH), set()
    request = request_for(segment)
    with pytest.raises(DigestMismatchError, match="part 2"):
        near.fetch(endpoints, Fetch(request, memoryview(target), done=done))
    assert 2 not in done
    far.close()
    near.fetch(
        far.serve(serving(segment)), Fetch(request, memoryview(target), done=done),
    )  # fmt: skip
    assert segment == target


def test_a_slot_whose_namesake_is_served_by_the_last_byte_is_not_found(ends, segment):
    """A3: another slot with the same shard, in an equal incarnation, says nothing of this one."""
    served = serving(segment[:1000])

    class Moving:
        asked = 0

        def lookup(self, key, incarnation):
            self.asked += 1
            if self.asked == 2:
                served.withdraw(SLOT)
                served.put(KEY, SlotName("s2", SLOT.incarnation, SLOT.state), memoryview(b"x"))
            return served.lookup(key, incarnation)

    near, far, _ = ends
    with pytest.raises(NotFoundError):
        near.fetch(
            far.serve(Moving()),
            Fetch(
                request_for(segment[:1000]),
                memoryview(bytearray(1000)),
            ),
        )


def test_a_mismatch_that_happens_once_is_asked_for_again(ends, segment):
    class Flickering:
        def __init__(self) -> None:
            self.asked = 0
            self.bad, self.good = memoryview(bytearray(1000)), memoryview(segment[:1000])

        def lookup(self, key, incarnation):
            self.asked += 1
            return self.bad if self.asked <= 2 else self.good

    near, far, _ = ends
    target = bytearray(1000)
    near.fetch(
        far.serve(Flickering()),
        Fetch(request_for(segment[:1000]), memoryview(target)),
    )
    assert segment[:1000] == target


@pytest.mark.parametrize("at", [0, 1])
def test_a_stream_that_ends_unforeseen_leaves_no_part_out_unsaid(segment, monkeypatch, at):
    """A4: parts that the stream had asked for are missing, whichever of the two it was."""
    near, far, _ = _tcp()
    made, arrived = [], threading.Barrier(2)

    def part_hasher():
        made.append(threading.current_thread())
        if len(made) <= 2:
            arrived.wait(10)  # both streams have a part
        if (threading.current_thread() is threading.main_thread()) == (at == 0):
            raise MemoryError
        return digest.part_hasher()

    monkeypatch.setattr(tcp_client, "part_hasher", part_hasher)
    endpoints = far.serve(serving(segment))
    target, done = memoryview(bytearray(LENGTH)), set()
    try:
        with pytest.raises(UnavailableError):
            near.fetch(endpoints, Fetch(request_for(segment), target, done=done))
    finally:
        far.close()
    assert done != {0, 1, 2}


def test_a_machine_without_threads_fetches_with_one_stream(segment, monkeypatch):
    near, far, _ = _tcp()
    endpoints = far.serve(serving(segment))
    target, done = bytearray(LENGTH), set()
    start = threading.Thread.start

    def refuses(thread):
        if thread.name == "fetch-stream":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    request, stop = request_for(segment), threading.Event()
    near.fetch(endpoints, Fetch(request, memoryview(target), done=done, stop=stop))
    far.close()
    assert segment == target


def test_a_machine_without_threads_serves_again_when_it_has_some(segment, monkeypatch):
    """P4: the thread that lets connections in outlives it."""
    near, far, _ = _tcp()
    endpoints = far.serve(serving(segment))
    start, short = threading.Thread.start, threading.Event()
    short.set()

    def refuses(thread):
        if thread.name == "fetch-serve" and short.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    target, stop = bytearray(LENGTH), threading.Event()
    with pytest.raises(UnavailableError):
        near.fetch(endpoints, Fetch(request_for(segment), memoryview(target), stop=stop))
    short.clear()
    near.fetch(endpoints, Fetch(request_for(segment), memoryview(target), stop=stop))
    far.close()
    assert segment == target


@pytest.mark.parametrize("address", ["x" * 70 + ".y:1", "é..:1", "a\0b:1", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_unavailable(segment, address):
    """P9: a peer says where it serves; what it says may be anything."""
    near, _, _ = _tcp()
    target = memoryview(bytearray(LENGTH))
    with pytest.raises(UnavailableError):
        near.fetch(tcp(address), Fetch(request_for(segment), target))


def test_of_several_endpoints_one_of_a_known_kind_is_taken(ends, segment):
    """A node serves over all that it has; whoever fetches need not have it too."""
    near, far, _ = ends
    endpoints = (Endpoint(kind="later", address="?"), *far.serve(serving(segment[:1000])))
    target = bytearray(1000)
    request, stop = request_for(segment[:1000]), threading.Event()
    near.fetch(endpoints, Fetch(request, memoryview(target), stop=stop))

    assert segment[:1000] == target


@pytest.mark.parametrize(
    ("kinds", "said"),
    [(("later", "other"), "later, other"), ((), "nothing")],
    ids=["kinds", "none"],
)
def test_a_peer_of_no_known_kind_is_unavailable_and_its_kinds_are_named(ends, kinds, said):
    near, _, _ = ends
    endpoints = tuple(Endpoint(kind=kind, address="127.0.0.1:1") for kind in kinds)
    target, stop = memoryview(bytearray(1)), threading.Event()
    with pytest.raises(UnavailableError, match=f"serves over {said}; this side fetches over "):
        near.fetch(endpoints, Fetch(request_for(b"x"), target, stop=stop))


def test_nobody_there_is_unavailable(ends, segment):
    near, _, nowhere = ends
    with pytest.raises(UnavailableError):
        near.fetch(
            nowhere,
            Fetch(
                request_for(segment),
                memoryview(bytearray(LENGTH)),
            ),
        )


def test_a_fetch_told_to_stop_is_interrupted(ends, segment):
    """F58: while bytes are on their way; nothing is noted that is not there."""
    stop = threading.Event()

    class Stopping:
        """Serves, and has the fetch told to stop before the second look at the slot."""

        asked = 0

        def lookup(self, key, incarnation):
            self.asked += 1
            if self.asked > 1:
                stop.set()
            return memoryview(segment)

    near, far, _ = ends
    endpoints = far.serve(Stopping())
    target, done = bytearray(LENGTH), set()
    with pytest.raises(StoppedError):
        near.fetch(endpoints, Fetch(request_for(segment), memoryview(target), done=done, stop=stop))

    assert stop.is_set()
    assert done < {0, 1, 2}
    assert all(segment[a:b] == target[a:b] for a, b in map(request_for(segment).part, done))


@pytest.mark.parametrize("secure", [False, True])
def test_a_fetch_from_a_source_that_says_nothing_is_interrupted(secure, member):
    """F58: shutdown does not wait for a peer that hangs."""
    tls.use(member if secure else None)
    stop = threading.Event()
    held: list[socket.socket] = []  # closed before its request is read, it would be reset

    def accept() -> None:
        connection = guarded(silent.accept()[0])
        greet(connection)
        held.append(connection)
        held[0].recv(1)
        stop.set()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asked = threading.Thread(target=accept)
        asked.start()
        near = TcpTransport("127.0.0.1")
        endpoints = tcp(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoppedError):
            near.fetch(endpoints, Fetch(request_for(b"x"), memoryview(bytearray(1)), stop=stop))
        near.close()
        asked.join()
        held[0].close()
    tls.use(None)


def test_a_source_that_stopped_serving_is_unavailable(ends, segment):
    near, far, _ = ends
    endpoints = far.serve(serving(segment))
    far.close()
    with pytest.raises(UnavailableError):
        near.fetch(
            endpoints,
            Fetch(
                request_for(segment),
                memoryview(bytearray(LENGTH)),
            ),
        )
