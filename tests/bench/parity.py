"""How near parity comes to its limits: an element to the library alone, lost shards to the wire."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tests.bench.bare import BARE, HOST, fetch_bare, send_bare, touched
from tests.bench.harness import Record, in_turn, share

from holdfast.core.inventory import Peer
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.format import parity
from holdfast.format.digest import part_digest, part_ranges, parts_count
from holdfast_services.agent import isal
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain.state import GivenPiece
from holdfast_services.agent.summing import Opened, Summing
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.tcp import TcpTransport

NAMES = ("parity/encode", "parity/recover_two")
MEMBERS_COUNT = 4
ELEMENTS_COUNT = 2
LOST = (0, 1)
RUNS = 9
RECOVER_RUNS = 5

Key = tuple[bool, int]
"""Whether it is an element, and its number."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the fraction of the library's speed on one core, and of bare sockets' in a recovery."""
    length_bytes = (256 << 20) // (16 if quick else 1)
    yield _encode(length_bytes)
    yield _recover_two(length_bytes)


def _encode(length_bytes: int) -> Record:
    members = [_filled(length_bytes) for _ in range(MEMBERS_COUNT)]
    total = memoryview(mmap.mmap(-1, length_bytes))
    terms = parity.terms_of_element(0, MEMBERS_COUNT)

    def ours() -> float:
        started_s = time.perf_counter()
        for begin, end in part_ranges(length_bytes):
            pieces = [(term.weight, members[term.number][begin:end]) for term in terms]
            isal.write_sum(total[begin:end], pieces)
            part_digest(total[begin:end])
        return time.perf_counter() - started_s

    def alone() -> float:
        return _encode_alone(members, total, terms)

    ours_s, alone_s = in_turn(ours, alone, runs=RUNS)
    return share(
        "parity/encode",
        ours_s,
        alone_s,
        peer="ec_encode_data, all members in one call",
        length_bytes=MEMBERS_COUNT * length_bytes,
        note=f"1 element of {MEMBERS_COUNT} members in memory, part by part, digests made",
        share_min=0.6,
    )


def _filled(length_bytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, length_bytes))
    block = os.urandom(1 << 20)
    for begin in range(0, length_bytes, len(block)):
        view[begin : begin + len(block)] = block[: length_bytes - begin]
    return view


def _encode_alone(
    members: list[memoryview], total: memoryview, terms: tuple[parity.Term, ...]
) -> float:
    library = isal._library()
    count, length = len(members), len(total)
    table = ctypes.create_string_buffer(isal.TABLE_BYTES * count)
    library.ec_init_tables(count, 1, bytes(term.weight for term in terms), table)
    sources = (ctypes.c_void_p * count)(*map(isal.address, members))
    target = (ctypes.c_void_p * 1)(isal.address(total))
    started_s = time.perf_counter()
    library.ec_encode_data(length, count, 1, table, sources, target)
    return time.perf_counter() - started_s


def _recover_two(length_bytes: int) -> Record:
    """Return how fast two lost shards of four come out of what is left, as agents do it.

    Of the same bytes over the wire: each lost shard takes as many pieces as there were members.
    """
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(there, length_bytes), daemon=True)
    server.start()
    endpoints, bare_port, digests = here.recv()
    peer = Peer(node="a", rpc_address="", endpoints=endpoints)
    opened = {key: _opened(key, peer, of, length_bytes) for key, of in digests.items()}
    transport = TcpTransport(HOST)
    summing = Summing(transport, PeerClients(), threading.Event())
    targets = {lost: memoryview(touched(length_bytes)) for lost in LOST}
    parts = range(parts_count(length_bytes))

    def make(lost: int) -> None:
        terms = parity.terms_of_member(
            lost, MEMBERS_COUNT, held=set(range(MEMBERS_COUNT)) - {*LOST},
            elements=range(ELEMENTS_COUNT),
        )  # fmt: skip
        summed = [(term, opened[term.is_element, term.number]) for term in terms]
        made = summing.fill(targets[lost], summed, parts)
        assert tuple(made[part] for part in parts) == digests[False, lost]

    def ours() -> float:
        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(LOST)) as threads:
            list(threads.map(make, LOST))
        return time.perf_counter() - started_s

    def bare() -> float:
        return sum(
            fetch_bare(bare_port, targets[lost]) for lost in LOST for _ in range(MEMBERS_COUNT)
        )

    ours_s, bare_s = in_turn(ours, bare, runs=RECOVER_RUNS)
    transport.close()
    server.terminate()
    server.join()
    lost_bytes = len(LOST) * length_bytes
    took_s = statistics.median(ours_s)
    return share(
        "parity/recover_two",
        ours_s,
        bare_s,
        peer=BARE,
        length_bytes=MEMBERS_COUNT * lost_bytes,
        note=f"2 lost shards of 4, {lost_bytes >> 20} MiB of 2 members and 2 elements of another "
        f"process in {took_s:.2f} s, {lost_bytes / took_s / 1e9:.2f} GB/s of what was lost, "
        f"verified twice",
        share_min=0.0,
    )


def _opened(key: Key, peer: Peer, digests: Sequence[bytes], length_bytes: int) -> Opened:
    is_element, number = key
    given = GivenPiece(number=number, is_element=is_element, root_digest=b"", peers=(peer,))
    return Opened(
        piece=given, peer=peer, key=_key(key), incarnation=1, length_bytes=length_bytes,
        digests=tuple(digests),
    )  # fmt: skip


def _key(key: Key) -> str:
    return f"bench/1/1/{int(key[0])}/{key[1]}"


def _serve(there: Connection, length_bytes: int) -> None:
    """Serve members and elements until this process is ended, and one of them bare."""
    pieces: dict[Key, memoryview] = {
        (False, number): _filled(length_bytes) for number in range(MEMBERS_COUNT)
    }
    for number in range(ELEMENTS_COUNT):
        pieces[True, number] = target = memoryview(touched(length_bytes))
        terms = parity.terms_of_element(number, MEMBERS_COUNT)
        isal.write_sum(target, [(term.weight, pieces[False, term.number]) for term in terms])
    segments = ServedSegments()
    for at, (key, view) in enumerate(pieces.items()):
        segments.put(_key(key), SlotName(f"s{at}", 1, SlotState.SEALED), view)
    endpoints = TcpTransport(HOST).serve(segments)
    digests = {
        key: tuple(part_digest(view[begin:end]) for begin, end in part_ranges(length_bytes))
        for key, view in pieces.items()
    }
    listener = socket.create_server((HOST, 0))
    there.send((endpoints, listener.getsockname()[1], digests))
    while True:
        connection, _ = listener.accept()
        view = pieces[False, 0]
        threading.Thread(target=send_bare, args=(connection, view), daemon=True).start()
