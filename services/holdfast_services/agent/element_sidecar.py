"""The sidecar ``<slot>.<incarnation>.sum`` of an element: the authority of what the slot holds.

It names the matrix, the stripe with the sidecars of all its members, which element it is, and the
digests of its own parts. Pure: bytes in, values out. The caller frees a slot whose sidecar breaks
a rule, since nobody can say any more what it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.stripes import Element, Stripe
from holdfast.errors import InvalidRequestError, ManifestError, UnsupportedFormatError
from holdfast.format import sidecar
from holdfast.format.canonical import canonical, hex_of, number_of, strict_object
from holdfast.format.digest import ALGORITHM, parts_count, root_digest, split_digests
from holdfast.format.parity import ELEMENTS_MAX, MATRIX, MEMBERS_MAX
from holdfast_services.agent.domain import HeldSum

VERSION = 1
ELEMENT_BYTES_MAX = 64 << 20


def encode(held: HeldSum) -> bytes:
    """Return the file that describes ``held``."""
    stripe = held.element.stripe
    members = zip(stripe.members, held.member_digests, strict=True)
    return canonical(
        {
            "version": VERSION,
            "matrix": MATRIX,
            "algorithm": ALGORITHM,
            "number": held.element.number,
            "elements": stripe.elements_count,
            "members": [
                sidecar.fields(sidecar.Sidecar(shard=shard, digests=split_digests(digests)))
                for shard, digests in members
            ],
            "root": held.root_digest.hex(),
            "parts": held.digests.hex(),
        }
    )


def decode(data: bytes, length_bytes_held: int) -> HeldSum:
    """Return what a slot of ``length_bytes_held`` holds, as its sidecar says.

    Raises:
        ManifestError: malformed, or digests that do not fit the length or each other.
        UnsupportedFormatError: written by a newer agent, with another matrix or algorithm.
    """
    raw = strict_object(data, what="element's sidecar", bytes_max=ELEMENT_BYTES_MAX)
    known = {"version": VERSION, "matrix": MATRIX, "algorithm": ALGORITHM}
    if {name: raw.get(name) for name in known} != known:
        raise UnsupportedFormatError(f"element's sidecar is not of {known}")
    members = _members(raw)
    try:
        stripe = Stripe(
            members=tuple(member.shard for member in members),
            elements_count=number_of(raw, "elements", ELEMENTS_MAX),
        )
        held = HeldSum(
            element=Element(stripe=stripe, number=number_of(raw, "number", ELEMENTS_MAX)),
            root_digest=hex_of(raw.get("root"), "root"),
            digests=hex_of(raw.get("parts"), "parts"),
            member_digests=tuple(b"".join(member.digests) for member in members),
        )
    except (InvalidRequestError, ValueError) as cause:
        raise ManifestError(f"element's sidecar is malformed: {cause}") from cause
    check(held, length_bytes_held)
    return held


def check(held: HeldSum, length_bytes: int) -> None:
    """Check an element against its length and its own digests.

    Raises:
        ManifestError: names the rule.
    """
    element, stripe = held.element, held.element.stripe
    if element.number >= stripe.elements_count:
        raise ManifestError(f"element {element.number} of {stripe.elements_count}")
    if len({shard.id.checkpoint for shard in stripe.members}) != 1:
        raise ManifestError("members of an element are of several checkpoints")
    if stripe.length_bytes != length_bytes:
        raise ManifestError(f"element of {stripe.length_bytes} bytes, not {length_bytes}")
    digests = parts_of(held)
    if len(digests) != parts_count(length_bytes):
        raise ManifestError(f"{len(digests)} part digests for {length_bytes} bytes")
    if root_digest(length_bytes, digests) != held.root_digest:
        raise ManifestError(f"part digests do not give the root of {element.key}")


def parts_of(held: HeldSum) -> tuple[bytes, ...]:
    """Return the part digests of an element, one by one.

    Raises:
        ManifestError: the last of them is torn.
    """
    try:
        return split_digests(held.digests)
    except ValueError as cause:
        raise ManifestError(f"element has torn digests: {cause}") from cause


def _members(raw: Mapping[str, object]) -> list[sidecar.Sidecar]:
    listed = raw.get("members")
    if not isinstance(listed, list) or not 0 < len(listed) <= MEMBERS_MAX:
        raise ManifestError(f"element's sidecar must name 1 to {MEMBERS_MAX} members")
    if not all(isinstance(item, dict) for item in listed):
        raise ManifestError("a member of an element is no object")
    return [sidecar.from_fields(item) for item in listed]
