"""How near a verified fetch between two processes comes to bare sockets, both on loopback."""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tests.bench.harness import Record, in_turn

from holdfast.core.digest import PART_BYTES, part_digest
from holdfast.core.slots import SlotName, SlotState
from holdfast_services.agent.transport import FetchRequest, ServedSegments
from holdfast_services.agent.transport.tcp import TcpTransport
from holdfast_services.agent.transport.tcp_client import STREAMS_COUNT

NAMES = ("fetch_tcp/bare",)
HOST = "127.0.0.1"
KEY = "bench/1/1/0/0"  # run, step, generation, rank, volume
SEND_BYTES = 4 << 20
RUNS = 9


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record: the fraction of the bare speed, with as many streams."""
    length_bytes = (1 << 30) // (16 if quick else 1)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(there, length_bytes), daemon=True)
    server.start()
    address, bare_port, digests = here.recv()
    destination = memoryview(_touched(length_bytes))
    request = FetchRequest(key=KEY, incarnation=1, length_bytes=length_bytes, digests=digests)
    transport = TcpTransport(HOST)

    def ours() -> float:
        started_s = time.perf_counter()
        transport.fetch(address, request, destination, done=set(), stop=threading.Event())
        return time.perf_counter() - started_s

    ours_s, bare_s = in_turn(ours, lambda: _fetch_bare(bare_port, destination), runs=RUNS)
    server.terminate()
    server.join()
    speed, bare_speed = (
        length_bytes / statistics.median(times_s) / 1e9 for times_s in (ours_s, bare_s)
    )
    yield Record(
        name="fetch_tcp/bare",
        value=speed,
        unit="GB/s",
        peer=f"send and recv_into, {STREAMS_COUNT} streams, nothing verified",
        peer_value=bare_speed,
        ratio=speed / bare_speed,
        bytes=length_bytes,
        note="two processes, loopback, every part verified; target: 0.8 of bare",
    )


def _touched(length_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length_bytes)
    memory.madvise(23)  # MADV_POPULATE_WRITE
    return memory


def _serve(there: Connection, length_bytes: int) -> None:
    """Serve the same bytes both ways until this process is ended."""
    view = memoryview(_touched(length_bytes))
    segments = ServedSegments()
    segments.put(KEY, SlotName("s1", 1, SlotState.SEALED), view)
    address = TcpTransport(HOST).serve(segments)
    begins = range(0, length_bytes, PART_BYTES)
    digests = tuple(part_digest(view[begin : begin + PART_BYTES]) for begin in begins)
    listener = socket.create_server((HOST, 0))
    there.send((address, listener.getsockname()[1], digests))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_bare, args=(connection, view), daemon=True).start()


def _send_bare(connection: socket.socket, view: memoryview) -> None:
    with connection:
        begin, end = (int(number) for number in connection.recv(64).split())
        for at in range(begin, end, SEND_BYTES):
            connection.sendall(view[at : min(at + SEND_BYTES, end)])


def _fetch_bare(port: int, destination: memoryview) -> float:
    started_s = time.perf_counter()
    share = len(destination) // STREAMS_COUNT
    threads = [
        threading.Thread(target=_receive_bare, args=(port, destination, n * share, (n + 1) * share))
        for n in range(STREAMS_COUNT)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_s


def _receive_bare(port: int, destination: memoryview, begin: int, end: int) -> None:
    with socket.create_connection((HOST, port), timeout=60) as connection:
        connection.sendall(f"{begin} {end}".encode())
        at = begin
        while at < end:
            received = connection.recv_into(destination[at:end])
            assert received, "the bare server hung up"
            at += received
