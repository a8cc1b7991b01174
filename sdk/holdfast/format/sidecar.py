"""The sidecar of a shard in the object store: its identity and the digests of its parts.

``docs/reference/bucket-v1.md`` is normative. The agents' own sidecar says more (whose copy it
is); this one says only what is true of every copy. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.facts import Shard
from holdfast.core.ids import WORLD_SIZE_MAX, job_name, shard_id
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format.canonical import canonical, hex_of, number_of, strict_object, text_of
from holdfast.format.digest import ALGORITHM, DIGEST_BYTES, parts_count, root_digest
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
    _check(sidecar.shard, sidecar.digests)
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
    version, algorithm = raw.get("version"), raw.get("algorithm")
    if type(version) is not int or version != VERSION or algorithm != ALGORITHM:
        raise UnsupportedFormatError(
            f"sidecar has version {str(version)[:20]!r}, algorithm {str(algorithm)[:20]!r}; "
            f"this reads {VERSION}, {ALGORITHM}"
        )
    try:
        shard = _shard(raw)
    except InvalidRequestError as cause:
        raise ManifestError(f"sidecar is malformed: {cause}") from cause
    if shard.id.key != raw["shard"]:
        raise ManifestError(f"sidecar spells its shard {str(raw['shard'])[:80]!r}")
    joined = hex_of(raw.get("parts"), "parts")
    if len(joined) % DIGEST_BYTES:
        raise ManifestError(f"{len(joined)} bytes of part digests")
    digests = tuple(joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
    _check(shard, digests)
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


def _check(shard: Shard, digests: tuple[bytes, ...]) -> None:
    """Check that the shard is in range and that its digests are all there and give its root.

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
