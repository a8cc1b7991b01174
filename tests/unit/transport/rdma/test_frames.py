"""The greeting of two queue pairs, and what is refused (P9)."""

from __future__ import annotations

import struct
from dataclasses import replace
from ipaddress import IPv6Address

import pytest

from holdfast.errors import InvalidRequestError
from holdfast_services.transport.rdma.frames import (
    GREETING,
    Greeting,
    decode_greeting,
    encode_greeting,
    encode_refusal,
    greeting_status,
)
from holdfast_services.transport.rdma.ports import LinkLayer
from holdfast_services.transport.wire import Status

MINE = Greeting(
    link_layer=LinkLayer.ETHERNET, queue_number=17, packet_number=0xABCDEF,
    gid=IPv6Address("::ffff:10.2.0.1"), lid=0, mtu=5, reads_count=16,
)  # fmt: skip


def test_a_greeting_is_what_the_page_says():
    data = encode_greeting(MINE)

    assert 36 == GREETING.size == len(data)
    assert b"HFRD\x01\x00\x00\x02" == data[:8]
    assert (17, 0xABCDEF) == struct.unpack_from("<II", data, 8)
    assert bytes(10) + b"\xff\xff\x0a\x02\x00\x01" == data[16:32]
    assert b"\x00\x00\x05\x10" == data[32:]


def test_a_greeting_arrives():
    other = replace(MINE, link_layer=LinkLayer.INFINIBAND, lid=65535, mtu=1, reads_count=1)

    assert [MINE, other] == [decode_greeting(encode_greeting(one)) for one in (MINE, other)]


def test_a_refusal_says_so_before_its_values_are_looked_at():
    assert Status.BUSY == greeting_status(encode_refusal(Status.BUSY))


@pytest.mark.parametrize(
    "broken",
    [
        {"queue_number": 1 << 24}, {"packet_number": 1 << 24}, {"mtu": 0}, {"mtu": 6},
        {"reads_count": 0}, {"reads_count": 17},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_its_range_is_refused(broken):
    with pytest.raises(InvalidRequestError, match="out of its range"):
        decode_greeting(encode_greeting(replace(MINE, **broken)))


@pytest.mark.parametrize("data", [b"HFDP" + bytes(32), encode_refusal(Status.BUSY)])
def test_what_is_no_greeting_is_refused(data):
    with pytest.raises(InvalidRequestError):
        decode_greeting(data)
