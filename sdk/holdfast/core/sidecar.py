"""The sidecar of a shard in the object store: its identity and the digests of its parts.

``docs/reference/bucket-v1.md`` is normative. The agents' own sidecar says more (whose copy it
is); this one says only what is true of every copy. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.canonical import canonical, strict_object
from holdfast.core.digest import ALGORITHM, DIGEST_BYTES, parts_count, root_digest
from holdfast.core.facts import Shard
from holdfast.core.ids import job_name, shard_id
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError

VERSION = 1
SIDECAR_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What is known of a segment without reading it; ``digests`` are its parts', in order."""

    shard: Shard
    digests: tuple[bytes, ...]


def encode(sidecar: Sidecar) -> bytes:
    """Return the canonical text of ``sidecar``: equal values, equal bytes."""
    shard = sidecar.shard
    return canonical(
        {
            "version": VERSION,
            "shard": shard.id.key,
            "job": shard.job,
            "world_size": shard.world_size,
            "plan_hash": shard.plan_hash,
            "length_bytes": shard.length_bytes,
            "algorithm": ALGORITHM,
            "root": shard.root_digest.hex(),
            "parts": b"".join(sidecar.digests).hex(),
        }
    )


def decode(data: bytes) -> Sidecar:
    """Return the sidecar in ``data``.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: another version or algorithm.
    """
    raw = strict_object(data, what="sidecar", bytes_max=SIDECAR_BYTES_MAX)
    if raw.get("version") != VERSION or raw.get("algorithm") != ALGORITHM:
        raise UnsupportedFormatError(
            f"sidecar has version {str(raw.get('version'))[:20]}, "
            f"algorithm {str(raw.get('algorithm'))[:20]}"
        )
    length_bytes, world_size = raw.get("length_bytes"), raw.get("world_size")
    if type(length_bytes) is not int or type(world_size) is not int or length_bytes < 0:
        raise ManifestError("sidecar has no length or no world size")
    try:
        shard = Shard(
            id=shard_id(str(raw["shard"])),
            job=job_name(str(raw["job"])),
            world_size=world_size,
            plan_hash=str(raw["plan_hash"]),
            length_bytes=length_bytes,
            root_digest=bytes.fromhex(str(raw["root"])),
        )
        joined = bytes.fromhex(str(raw["parts"]))
    except (KeyError, ValueError, InvalidRequestError) as cause:
        raise ManifestError(f"sidecar is malformed: {cause}") from cause
    if len(joined) != DIGEST_BYTES * parts_count(length_bytes):
        raise ManifestError(f"{len(joined)} bytes of part digests for {length_bytes} bytes")
    digests = tuple(joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
    if root_digest(length_bytes, digests) != shard.root_digest:
        raise ManifestError(f"part digests do not give the root of {shard.id.key}")
    return Sidecar(shard=shard, digests=digests)
