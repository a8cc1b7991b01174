"""The control connection's bytes, beside the requests of kind ``tcp`` (``transport.wire``). Pure.

``docs/reference/data-plane-rdma.md`` has the tables. All integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from holdfast.errors import InvalidRequestError
from holdfast_services.transport.rdma.ports import READS_COUNT_MAX, LinkLayer
from holdfast_services.transport.wire import Status

MAGIC = b"HFRD"
VERSION = 1
DONE = b"DONE"
MTU_MAX = 5

GREETING = struct.Struct("<4sHBBII16sHBB")
LENT = struct.Struct("<IIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What one side says of its queue pair; ``mtu`` and ``reads_count`` as in ``ports.Port``."""

    link_layer: LinkLayer
    queue_number: int
    packet_number: int
    gid: IPv6Address
    lid: int
    mtu: int
    reads_count: int


def encode_greeting(greeting: Greeting) -> bytes:
    """Return the greeting as it is sent."""
    return GREETING.pack(
        MAGIC, VERSION, Status.OK, greeting.link_layer, greeting.queue_number,
        greeting.packet_number, greeting.gid.packed, greeting.lid, greeting.mtu,
        greeting.reads_count,
    )  # fmt: skip


def encode_refusal(status: Status) -> bytes:
    """Return the answer to whom no queue pair is given."""
    return GREETING.pack(MAGIC, VERSION, status, 0, 0, 0, bytes(16), 0, 0, 0)


def greeting_status(data: bytes) -> int:
    """Return what an answer says, before its values are looked at.

    Raises:
        InvalidRequestError: not of this protocol.
    """
    magic, version, status, *_ = GREETING.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise InvalidRequestError("not a greeting of RDMA, version 1")
    return int(status)


def decode_greeting(data: bytes) -> Greeting:
    """Return the greeting.

    Raises:
        InvalidRequestError: not of this protocol, or a value is out of its range.
    """
    greeting_status(data)
    _, _, _, link_layer, queue, packet, gid, lid, mtu, reads = GREETING.unpack(data)
    good = link_layer in set(LinkLayer) and 1 <= mtu <= MTU_MAX and 1 <= reads <= READS_COUNT_MAX
    if not good or queue >> 24 or packet >> 24:
        raise InvalidRequestError("a value of the greeting is out of its range")
    return Greeting(
        link_layer=LinkLayer(link_layer),
        queue_number=queue,
        packet_number=packet,
        gid=IPv6Address(gid),
        lid=lid,
        mtu=mtu,
        reads_count=reads,
    )
