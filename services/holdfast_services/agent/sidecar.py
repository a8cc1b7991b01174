"""The sidecar ``<slot>.<incarnation>.sum``: what ``format.sidecar`` says, and whose copy it is.

Pure: bytes in, values out. A sidecar that breaks a rule is a ManifestError; the caller then
hashes the slot again as if it had just been closed.
"""

from __future__ import annotations

from holdfast.core.ids import node_name
from holdfast.core.inventory import HeldState
from holdfast.errors import InvalidRequestError, ManifestError
from holdfast.format.canonical import canonical, strict_object, text_of
from holdfast.format.digest import DIGEST_BYTES, parts_count, split_digests
from holdfast.format.sidecar import Sidecar, fields, from_fields
from holdfast_services.agent.domain import Content

NAMES_BYTES_MAX = 4 << 10


def length_bytes(segment_bytes: int) -> int:
    """Return the most that the sidecar of a segment may take."""
    return NAMES_BYTES_MAX + 2 * DIGEST_BYTES * parts_count(segment_bytes)


def encode(content: Content) -> bytes:
    """Return the file that describes ``content``."""
    sidecar = Sidecar(shard=content.shard, digests=split_digests(content.digests))
    return canonical(
        {
            **fields(sidecar),
            "owner": content.owner,
            "source": content.source,
            "quarantined": content.held is HeldState.QUARANTINED,
        }
    )


def decode(data: bytes, length_bytes_held: int) -> Content:
    """Return what a slot of ``length_bytes_held`` holds, as its sidecar says.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: written by a newer agent, or with another algorithm.
    """
    raw = strict_object(data, what="sidecar", bytes_max=length_bytes(length_bytes_held))
    sidecar = from_fields(raw)
    shard, source = sidecar.shard, raw.get("source")
    if shard.length_bytes != length_bytes_held:
        raise ManifestError(
            f"sidecar speaks of {shard.length_bytes} bytes, not {length_bytes_held}"
        )
    if type(raw.get("quarantined")) is not bool:
        raise ManifestError("sidecar does not say whether its slot is quarantined")
    try:
        owner = node_name(text_of(raw, "owner"))
    except InvalidRequestError as cause:
        raise ManifestError(f"sidecar is malformed: {cause}") from cause
    return Content(
        shard=shard,
        owner=owner,
        digests=b"".join(sidecar.digests),
        source=source if source in ("peer", "object") else "memory",
        held=HeldState.QUARANTINED if raw["quarantined"] else HeldState.SEALED,
    )
