"""Fetches segments over TCP: a few streams pull 16 MiB parts from one queue, verified inline.

Each stream is one connection and one thread; the first error stops all. A stream has asked for
the next part before the last has arrived, and hashes every slice as it comes, while it is in the
cache (measured: ``docs/reference/data-plane.md``).
"""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from holdfast.errors import (
    CheckpointError,
    DigestMismatchError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.format.digest import PartHasher, part_hasher
from holdfast_services.transport import Fetch, Job, wire
from holdfast_services.transport.connection import NOT_YET, connect
from holdfast_services.transport.wire import Status

STREAMS_COUNT = 2
ASKED_COUNT_MAX = 2
STALL_S_MAX = 10.0
POLL_S = 0.2
SLICE_BYTES = 4 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job(Job):
    """One fetch, shared by its streams."""

    parts: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    mismatched: set[int] = field(default_factory=set)
    errors: list[CheckpointError] = field(default_factory=list)


def fetch_from(address: str, fetch: Fetch, *, streams_count: int = STREAMS_COUNT) -> None:
    """Fill the destination; the promise is ``Transport.fetch``'s."""
    job, missing = _Job(address, fetch), fetch.missing
    for index in missing:
        job.parts.put(index)
    threads = _helpers(job, min(streams_count, len(missing)) - 1)
    if missing:
        _stream(job)
    for thread in threads:
        thread.join()
    if job.errors:
        raise job.errors[0]


def _helpers(job: _Job, count: int) -> list[threading.Thread]:
    """Start streams beside the caller's own; fewer, where the machine has no more threads."""
    started: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=_stream, args=(job,), name="fetch-stream", daemon=True)
        try:
            thread.start()
        except RuntimeError as cause:
            log.warning("fetch of %s with one stream: %s", job.fetch.request.key, cause)
            break
        started.append(thread)
    return started


def _stream(job: _Job) -> None:
    try:
        with _connect(job) as connection:
            asked: deque[int] = deque()
            while not job.errors:
                while len(asked) < ASKED_COUNT_MAX and _ask(job, connection, asked):
                    pass
                if not asked:
                    return
                _part(job, connection, asked.popleft())
    except CheckpointError as error:
        job.errors.append(error)
    except Exception as cause:  # noqa: BLE001 - whatever ends a stream: its parts are missing
        broken = UnavailableError(f"{job.address} broke off: {cause}")
        broken.__cause__ = cause
        job.errors.append(broken)


def _connect(job: _Job) -> socket.socket:
    connection = connect(job.address)
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(POLL_S)  # OpenSSL would wait on, where the kernel's time is over
        return connection
    # The kernel's timeouts: the socket stays blocking, so that a slice takes one call.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(POLL_S))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_S_MAX))
    return connection


def _timeval(wait_s: float) -> bytes:
    """Return a ``struct timeval`` of 64-bit Linux."""
    return struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))


def _ask(job: _Job, connection: socket.socket, asked: deque[int]) -> bool:
    """Send the request for the next part not yet requested; False when there is none."""
    try:
        index = job.parts.get_nowait()
    except queue.Empty:
        return False
    begin, end = job.fetch.request.part(index)
    request = wire.PartRequest(
        key=job.fetch.request.key,
        incarnation=job.fetch.request.incarnation,
        begin=job.fetch.request.offset_bytes + begin,
        length_bytes=end - begin,
    )
    connection.sendall(wire.encode_request(request))
    asked.append(index)
    return True


def _part(job: _Job, connection: socket.socket, index: int) -> None:
    """Receive the part asked for first; queue it once more when it does not match."""
    fetch = job.fetch
    begin, end = fetch.request.part(index)
    found = _receive_part(job, connection, fetch.destination[begin:end])
    if found == fetch.request.digests[index]:
        fetch.done.add(index)
    elif index not in job.mismatched:
        job.mismatched.add(index)
        job.parts.put(index)
    else:
        raise DigestMismatchError(
            f"part {index} of {fetch.request.key} from {job.address} does not match its digest"
        )


def _receive_part(job: _Job, connection: socket.socket, piece: memoryview) -> bytes:
    """Fill ``piece`` with one answer; return the digest of what came."""
    head = bytearray(wire.RESPONSE.size)
    _receive_into(job, connection, memoryview(head))
    status, length = wire.RESPONSE.unpack(head)
    _check_status(job, status)
    if length != len(piece):
        raise UnavailableError(f"{job.address} offers {length} bytes, not {len(piece)}")
    hasher = part_hasher()
    _receive_into(job, connection, piece, hasher)
    trailer = bytearray(wire.TRAILER.size)
    _receive_into(job, connection, memoryview(trailer))
    _check_status(job, *wire.TRAILER.unpack(trailer))
    return hasher.digest()


def _receive_into(
    job: _Job, connection: socket.socket, target: memoryview, hasher: PartHasher | None = None
) -> None:
    """Fill ``target`` and hash what arrives; looks every ``POLL_S`` whether the fetch is to end."""
    at = 0
    heard_s = time.monotonic()
    while at < len(target):
        job.check()
        try:
            count = _receive_some(connection, target[at : at + SLICE_BYTES])
        except NOT_YET as cause:
            if time.monotonic() - heard_s > STALL_S_MAX:
                raise UnavailableError(f"{job.address} is silent") from cause
            continue
        if count == 0:
            raise UnavailableError(f"{job.address} broke off")
        if hasher is not None:
            hasher.update(target[at : at + count])
        at += count
        heard_s = time.monotonic()


def _receive_some(connection: socket.socket, target: memoryview) -> int:
    """Fill ``target`` if all comes in time, with TLS from one record; return how much came."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(target)
    return connection.recv_into(target, 0, socket.MSG_WAITALL)


def _check_status(job: _Job, status: int) -> None:
    if status == Status.OK:
        return
    if status == Status.NOT_FOUND:
        raise NotFoundError(f"{job.address} no longer has {job.fetch.request.key}")
    if status == Status.BUSY:
        raise UnavailableError(f"{job.address} has too many connections")
    raise InvalidRequestError(f"{job.address} refused the request for {job.fetch.request.key}")
