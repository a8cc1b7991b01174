"""The sidecar ``<slot>.<incarnation>.sum``: JSON with a sealed slot's identity and digests.

Pure: bytes in, values out. A sidecar that breaks a rule is a ManifestError; the caller then
hashes the slot again as if it had just been closed.
"""

from __future__ import annotations

import json

from holdfast.core.facts import HeldState, Shard
from holdfast.core.ids import job_name, node_name, shard_id
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.digest import ALGORITHM, DIGEST_BYTES, parts_count, root_digest
from holdfast_services.agent.domain import Content

VERSION = 1
NAMES_BYTES_MAX = 4 << 10

_MALFORMED = (
    *(KeyError, TypeError, ValueError, OverflowError, RecursionError),
    InvalidRequestError,
)


def length_bytes(segment_bytes: int) -> int:
    """Return the most that the sidecar of a segment may take."""
    return NAMES_BYTES_MAX + 2 * DIGEST_BYTES * parts_count(segment_bytes)


def encode(content: Content) -> bytes:
    """Return the file that describes ``content``."""
    shard = content.shard
    return json.dumps(
        {
            "version": VERSION,
            "shard": shard.id.key,
            "job": shard.job,
            "world_size": shard.world_size,
            "plan_hash": shard.plan_hash,
            "length_bytes": shard.length_bytes,
            "algorithm": ALGORITHM,
            "root": shard.root_digest.hex(),
            "parts": content.digests.hex(),
            "owner": content.owner,
            "source": content.source,
            "quarantined": content.held is HeldState.QUARANTINED,
        }
    ).encode()


def decode(data: bytes, length_bytes: int) -> Content:
    """Return what a slot of ``length_bytes`` holds, as its sidecar says.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: written by a newer agent, or with another algorithm.
    """
    try:
        raw = json.loads(data)
        if raw["version"] != VERSION or raw["algorithm"] != ALGORITHM:
            raise UnsupportedFormatError(
                f"sidecar version {raw['version']}, algorithm {raw['algorithm']}"
            )
        shard = Shard(
            id=shard_id(raw["shard"]),
            job=job_name(raw["job"]),
            world_size=int(raw["world_size"]),
            plan_hash=str(raw["plan_hash"]),
            length_bytes=int(raw["length_bytes"]),
            root_digest=bytes.fromhex(raw["root"]),
        )
        content = Content(
            shard=shard,
            owner=node_name(raw["owner"]),
            digests=bytes.fromhex(raw["parts"]),
            source=raw["source"] if raw["source"] in ("peer", "object") else "memory",
            held=HeldState.QUARANTINED if raw["quarantined"] else HeldState.SEALED,
        )
    except _MALFORMED as cause:
        raise ManifestError(f"sidecar is malformed: {cause}") from cause
    if shard.length_bytes != length_bytes:
        raise ManifestError(f"sidecar speaks of {shard.length_bytes} bytes, not {length_bytes}")
    check_digests(shard, content.digests)
    return content


def split(digests: bytes) -> list[bytes]:
    """Return joined part digests one by one."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def check_digests(shard: Shard, digests: bytes) -> None:
    """Check that part digests are as many as the length asks for and give the root.

    Raises:
        ManifestError: they do not belong to this shard.
    """
    if len(digests) != DIGEST_BYTES * parts_count(shard.length_bytes):
        raise ManifestError(f"{len(digests)} bytes of part digests for {shard.length_bytes}")
    if root_digest(shard.length_bytes, split(digests)) != shard.root_digest:
        raise ManifestError(f"part digests do not give the root of {shard.id.key}")
