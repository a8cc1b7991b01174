"""Bytes over bare sockets on loopback, nothing verified: what fetches are measured against."""

from __future__ import annotations

import mmap
import socket
import threading
import time

from holdfast_services.transport.tcp_client import STREAMS_COUNT

HOST = "127.0.0.1"
SEND_BYTES = 4 << 20
BARE = f"send and recv_into, {STREAMS_COUNT} streams, nothing verified"


def touched(length_bytes: int) -> mmap.mmap:
    """Return memory whose pages are there."""
    memory = mmap.mmap(-1, length_bytes)
    memory.madvise(23)  # MADV_POPULATE_WRITE
    return memory


def send_bare(connection: socket.socket, view: memoryview) -> None:
    """Send the range of ``view`` that the other side asks for."""
    with connection:
        begin, end = (int(number) for number in connection.recv(64).split())
        for at in range(begin, end, SEND_BYTES):
            connection.sendall(view[at : min(at + SEND_BYTES, end)])


def fetch_bare(port: int, destination: memoryview) -> float:
    """Fill ``destination`` from who listens there with ``send_bare``; return the seconds."""
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
