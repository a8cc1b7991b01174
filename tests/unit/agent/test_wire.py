"""The data plane's bytes, and a server that strangers write to."""

from __future__ import annotations

import socket

import pytest

from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import InvalidRequestError
from holdfast_services.transport import ServedSegments, wire
from holdfast_services.transport.tcp_server import TcpServer

REQUEST = wire.PartRequest(key="r1/5/1/0/0", incarnation=7, begin=2, length_bytes=3)


def test_the_request_has_the_documented_bytes():
    data = wire.encode_request(REQUEST)
    assert b"HFDP" == data[:4]
    assert (1).to_bytes(2, "little") == data[4:6]
    assert (10).to_bytes(2, "little") == data[6:8]
    assert (7).to_bytes(8, "little") == data[8:16]
    assert (2).to_bytes(8, "little") == data[16:24]
    assert (3).to_bytes(8, "little") == data[24:32]
    assert b"r1/5/1/0/0" == data[32:]


def test_a_request_survives_the_wire():
    data = wire.encode_request(REQUEST)
    assert REQUEST == wire.decode_request(data[:32], data[32:])


@pytest.mark.parametrize(
    "head",
    [
        b"GET " + bytes(28),
        wire.REQUEST.pack(b"HFDP", 2, 5, 0, 0, 1),
        wire.REQUEST.pack(b"HFDP", 1, 0, 0, 0, 1),
        wire.REQUEST.pack(b"HFDP", 1, 256, 0, 0, 1),
    ],
)
def test_what_is_not_a_request_is_refused(head):
    with pytest.raises(InvalidRequestError):
        wire.key_length(head)


@pytest.mark.parametrize("key", [b"../../etc/passwd", b"/etc/passwd", b"r1/5/1/0", b"\xff" * 9])
def test_a_key_that_is_not_a_shard_is_refused(key):
    """P9."""
    head = wire.REQUEST.pack(b"HFDP", 1, len(key), 0, 0, 1)
    with pytest.raises(InvalidRequestError):
        wire.decode_request(head, key)


@pytest.mark.parametrize("length", [0, (16 << 20) + 1, 2**64 - 1])
def test_a_length_beyond_a_part_is_refused(length):
    with pytest.raises(InvalidRequestError):
        wire.decode_request(wire.REQUEST.pack(b"HFDP", 1, 10, 0, 0, length), b"r1/5/1/0/0")


@pytest.fixture
def server():
    served = ServedSegments()
    served.put("r1/5/1/0/0", SlotName("s1", 7, SlotState.SEALED), memoryview(b"0123456789"))
    made = TcpServer("127.0.0.1", 0, served)
    yield made
    made.close()


def ask(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
        return answer


def test_the_server_answers_with_header_bytes_and_trailer(server):
    answer = ask(server, wire.encode_request(REQUEST))
    assert wire.RESPONSE.pack(0, 3) + b"234" + wire.TRAILER.pack(0) == answer


def test_many_requests_go_over_one_connection(server):
    assert 2 * 19 == len(ask(server, wire.encode_request(REQUEST) * 2))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        bytes(64),
        wire.REQUEST.pack(b"HFDP", 1, 10, 7, 8, 3) + b"r1/5/1/0/0",
        wire.REQUEST.pack(b"HFDP", 1, 10, 7, 2**64 - 1, 3) + b"r1/5/1/0/0",
        wire.REQUEST.pack(b"HFDP", 1, 16, 7, 0, 3) + b"../../etc/passwd",
    ],
    ids=["http", "zeros", "beyond", "overflow", "path"],
)
def test_a_malformed_request_gets_a_status_and_the_server_lives_on(server, data):
    assert wire.RESPONSE.pack(2, 0) == ask(server, data)
    assert wire.RESPONSE.pack(0, 3) == ask(server, wire.encode_request(REQUEST))[:12]


def test_a_request_cut_off_is_forgotten(server):
    assert b"" == ask(server, wire.encode_request(REQUEST)[:20])
    assert 19 == len(ask(server, wire.encode_request(REQUEST)))
