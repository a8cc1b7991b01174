"""Our fetch against a bare send/recv_into loop, in turn, between two processes, medians of five.

``python tests/bench/bench_fetch.py [BYTES]`` prints one JSON line; ``measure`` is for the suite.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection

from holdfast.core.digest import part_digests
from holdfast.core.slots import SlotName, SlotState
from holdfast_services.agent.transport import FetchRequest, ServedSegments
from holdfast_services.agent.transport.tcp import TcpTransport

ROUNDS = 5
SLICE_BYTES = 16 << 20
STREAMS = 2
KEY = "r1/1/1/0/0"


def _mapping(length_bytes: int) -> mmap.mmap:
    view = mmap.mmap(-1, length_bytes)
    view.madvise(23)
    return view


def _serve(length_bytes: int, pipe: Connection) -> None:
    """Serve one segment both ways until the pipe closes."""
    data = _mapping(length_bytes)
    pattern = bytes(range(251)) * 4096
    for at in range(0, length_bytes, len(pattern)):
        end = min(at + len(pattern), length_bytes)
        data[at:end] = pattern[: end - at]
    view = memoryview(data)
    served = ServedSegments()
    served.put(KEY, SlotName("s1", 1, SlotState.SEALED), view)
    transport = TcpTransport("127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_bare_server, args=(listener, view), daemon=True).start()
    pipe.send((transport.serve(served), listener.getsockname()[1], part_digests(view)))
    pipe.recv()


def _bare_server(listener: socket.socket, view: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_bare_send, args=(connection, view), daemon=True).start()


def _bare_send(connection: socket.socket, view: memoryview) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin, end = (int.from_bytes(connection.recv(8), "little") for _ in range(2))
        for at in range(begin, end, SLICE_BYTES):
            connection.sendall(view[at : min(at + SLICE_BYTES, end)])


def _bare_fetch(port: int, target: memoryview) -> None:
    half = len(target) // STREAMS

    def stream(begin: int, end: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(begin.to_bytes(8, "little"))
            time.sleep(0.001)
            connection.sendall(end.to_bytes(8, "little"))
            while begin < end:
                begin += connection.recv_into(target[begin:end])

    threads = [
        threading.Thread(target=stream, args=(i * half, (i + 1) * half)) for i in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(length_bytes: int) -> dict[str, object]:
    """Return the record ``fetch_tcp/bare``: verified GB/s of ours, of the bare loop, the ratio."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(length_bytes, there), daemon=True
    )
    server.start()
    address, port, digests = here.recv()
    target = memoryview(_mapping(length_bytes))
    request = FetchRequest(
        key=KEY, incarnation=1, length_bytes=length_bytes, digests=tuple(digests)
    )
    client = TcpTransport("127.0.0.1")
    ours_s: list[float] = []
    bare_s: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        client.fetch(address, request, target, done=set(), stop=threading.Event())
        ours_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        _bare_fetch(port, target)
        bare_s.append(time.perf_counter() - begun)
    here.send("end")
    server.join(timeout=5)
    ours = length_bytes / statistics.median(ours_s[1:]) / 1e9
    bare = length_bytes / statistics.median(bare_s[1:]) / 1e9
    return {
        "name": "fetch_tcp/bare",
        "value": round(ours, 3),
        "unit": "GB/s",
        "peer": "bare send/recv_into",
        "peer_value": round(bare, 3),
        "ratio": round(ours / bare, 3),
        "bytes": length_bytes,
        "note": f"verified, {STREAMS} streams, loopback, medians of {ROUNDS}",
    }


if __name__ == "__main__":
    sys.path[:0] = ["sdk", "services"]
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 30)))
