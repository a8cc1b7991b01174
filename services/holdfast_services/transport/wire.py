"""The data plane's bytes. ``docs/reference/data-plane.md`` is this table.

All integers are little-endian. A connection carries requests one after the other.

Request, 32 bytes and the key::

    offset  width  field
    0       4      magic ``HFDP``
    4       2      version, 1
    6       2      K, length of the key, 1..255
    8       8      slot incarnation
    16      8      offset of the first byte
    24      8      length, 1..16 MiB
    32      K      shard key ``run/step/generation/rank/volume``, ASCII

Response, 12 bytes; the bytes and the trailer only when the status is OK::

    offset  width  field
    0       4      status
    4       8      L, number of bytes that follow; 0 unless OK
    12      L      the bytes
    12+L    4      status after the last byte: OK, or NOT_FOUND when the slot changed meanwhile

After INVALID and BUSY the server closes the connection.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from holdfast.core.ids import shard_id
from holdfast.core.stripes import is_element_key
from holdfast.errors import InvalidRequestError
from holdfast.format.digest import PART_BYTES

MAGIC = b"HFDP"
VERSION = 1
KEY_BYTES_MAX = 255

REQUEST = struct.Struct("<4sHHQQQ")
RESPONSE = struct.Struct("<IQ")
TRAILER = struct.Struct("<I")


class Status(IntEnum):
    """What a server says before and after the bytes."""

    OK = 0
    NOT_FOUND = 1
    INVALID = 2
    BUSY = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Bytes ``[begin, begin + length_bytes)`` of a shard in a slot incarnation."""

    key: str
    incarnation: int
    begin: int
    length_bytes: int


def encode_request(request: PartRequest) -> bytes:
    """Return the request as it is sent."""
    key = request.key.encode("ascii")
    return (
        REQUEST.pack(
            MAGIC, VERSION, len(key), request.incarnation, request.begin, request.length_bytes
        )
        + key
    )


def key_length(head: bytes) -> int:
    """Return how many bytes of key follow the first 32.

    Raises:
        InvalidRequestError: not a request of this protocol.
    """
    magic, version, length, _, _, _ = REQUEST.unpack(head)
    if magic != MAGIC or version != VERSION or not 0 < length <= KEY_BYTES_MAX:
        raise InvalidRequestError("not a data plane request of version 1")
    return int(length)


def decode_request(head: bytes, key: bytes) -> PartRequest:
    """Return the request.

    Raises:
        InvalidRequestError: the key is no shard's and no element's, or no part has the length.
    """
    _, _, _, incarnation, begin, length = REQUEST.unpack(head)
    try:
        name = key.decode("ascii")
    except UnicodeDecodeError as cause:
        raise InvalidRequestError("shard key is not ASCII") from cause
    if not is_element_key(name):
        name = shard_id(name).key
    if not 0 < length <= PART_BYTES:
        raise InvalidRequestError(f"length {length} is not 1..{PART_BYTES}")
    return PartRequest(key=name, incarnation=incarnation, begin=begin, length_bytes=length)
