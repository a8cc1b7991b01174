"""With TLS, whoever has not said who it is takes no member's place."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest
from tests.members import Members

from holdfast.errors import UnavailableError
from holdfast.rpc import tls
from holdfast_services.transport.connection import connect, receive
from holdfast_services.transport.listener import CONNECTIONS_COUNT_MAX, Listener


def echo(connection):
    while word := receive(connection, 4):
        connection.sendall(word)


@pytest.fixture
def held(tmp_path):
    """What is to be closed after a test; its process is a member."""
    tls.use(Members().issue(tmp_path / "member"))
    with ExitStack() as stack:
        yield stack
    tls.use(None)


@pytest.fixture
def address(held):
    listener = Listener("127.0.0.1", 0, serve=echo, busy=b"busy", name="echo")
    held.enter_context(closing(listener))
    return f"127.0.0.1:{listener.port}"


def echoed(connection):
    connection.sendall(b"word")
    return receive(connection, 4)


def is_served(held, address):
    try:
        return b"word" == echoed(held.enter_context(connect(address)))
    except (OSError, UnavailableError):
        return False


def test_strangers_who_say_nothing_keep_no_member_out(held, address):
    host, _, port = address.rpartition(":")
    for _ in range(CONNECTIONS_COUNT_MAX):
        held.enter_context(socket.create_connection((host, int(port))))

    assert is_served(held, address)


def test_members_who_have_said_who_they_are_are_not_cut_for_one_more(held, address):
    members = [held.enter_context(connect(address)) for _ in range(CONNECTIONS_COUNT_MAX)]
    assert {b"word"} == {echoed(each) for each in members}
    assert not is_served(held, address)

    assert {b"word"} == {echoed(each) for each in members}
