"""The sidecar of a shard: its identity and the digests of its parts.

``docs/reference/bucket-v1.md`` is normative. An agent's sidecar says all this too, and whose copy
it is besides: ``fields`` and ``from_fields`` are the part that both share. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.ids import WORLD_SIZE_MAX, job_name, shard_id
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.canonical import canonical, hex_of, number_of, strict_object, text_of
from holdfast.format.digest import (
    ALGORITHM,
    DIGEST_BYTES,
    parts_count,
    root_digest,
    split_digests,
)
from holdfast.format.manifest import LENGTH_BYTES_MAX, check_shard

VERSION = 1
SIDECAR_BYTES_MAX = 64 << 20
"""Enough for a segment of ``LENGTH_BYTES_MAX``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What is known of a segment without reading it; ``digests`` are its parts', in order."""

    shard: Shard
    digests: tuple[bytes, ...]


def encode(sidecar: Sidecar) -> bytes:
    """Return the canonical text of ``sidecar``: equal values, equal bytes.

    Raises:
        ManifestError: it breaks a rule of the format; it would not be read back.
    """
    check_digests(sidecar.shard, sidecar.digests)
    return canonical(fields(sidecar))


def decode(data: bytes) -> Sidecar:
    """Return the sidecar in ``data``.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: another version or algorithm.
    """
    return from_fields(strict_object(data, what="sidecar", bytes_max=SIDECAR_BYTES_MAX))


def fields(sidecar: Sidecar) -> dict[str, object]:
    """Return what a sidecar says, as JSON; nothing is checked."""
    shard = sidecar.shard
    return {
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


def from_fields(raw: Mapping[str, object]) -> Sidecar:
    """Return the sidecar that ``raw`` says; fields that it does not know are left out.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: another version or algorithm.
    """
    version, algorithm = raw.get("version"), raw.get("algorithm")
    if type(version) is not int or version != VERSION or algorithm != ALGORITHM:
        raise UnsupportedFormatError(
            f"sidecar has version {str(version)[:20]!r}, algorithm {str(algorithm)[:20]!r}; "
            f"this reads {VERSION}, {ALGORITHM}"
        )
    try:
        shard = _shard(raw)
        digests = split_digests(hex_of(raw.get("parts"), "parts"))
    except (InvalidRequestError, ValueError) as cause:
        raise ManifestError(f"sidecar is malformed: {cause}") from cause
    if shard.id.key != raw["shard"]:
        raise ManifestError(f"sidecar spells its shard {str(raw['shard'])[:80]!r}")
    check_digests(shard, digests)
    return Sidecar(shard=shard, digests=digests)


def _shard(raw: Mapping[str, object]) -> Shard:
    return Shard(
        id=shard_id(text_of(raw, "shard")),
        job=job_name(text_of(raw, "job")),
        world_size=number_of(raw, "world_size", WORLD_SIZE_MAX),
        plan_hash=text_of(raw, "plan_hash"),
        length_bytes=number_of(raw, "length_bytes", LENGTH_BYTES_MAX),
        root_digest=hex_of(raw.get("root"), "root"),
    )


def check_digests(shard: Shard, digests: tuple[bytes, ...]) -> None:
    """Check that ``shard`` is in range and that its part digests are all there and give its root.

    Raises:
        ManifestError: names the rule.
    """
    check_shard(shard)
    if len(digests) != parts_count(shard.length_bytes):
        raise ManifestError(f"{len(digests)} part digests for {shard.length_bytes} bytes")
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ManifestError(f"a part digest is not {DIGEST_BYTES} bytes")
    if root_digest(shard.length_bytes, digests) != shard.root_digest:
        raise ManifestError(f"part digests do not give the root of {shard.id.key}")
