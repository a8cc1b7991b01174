"""Seals closed slots and checks sealed ones: hashing, the header's word, the sidecar.

Runs in threads; blocking. Knows the arena and the segment format, nothing of the network.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import CheckpointError, ConflictError, ExhaustedError, ManifestError
from holdfast.format.digest import part_digest, part_digests, part_ranges, root_digest
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast_services.agent import sidecar
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import Content

CHECK_THREADS_COUNT = 4

log = logging.getLogger(__name__)


class SlotBusyError(ConflictError):
    """The writer still holds the slot's lock."""


class HeadlessError(ManifestError):
    """It has no head: a rank had filled it in for a copy, and who knew that is gone."""


def seal(
    arena: Arena, name: SlotName, *, owner: str, expected: tuple[str, int, int] | None
) -> Content:
    """Hash a closed slot, put its sidecar and rename it to sealed; return what it holds.

    The lock is held meanwhile, so that nobody writes under the digest. The rename comes last:
    until then there is no sealed slot.

    Args:
        arena: Where the slot is.
        name: The closed slot.
        owner: Node whose trainer wrote it, unless a sidecar of the same shard says otherwise: that
            of a fetch which died between its two renames.
        expected: (run, generation, rank) of the session that leased it, if known.

    Raises:
        SlotBusyError: the writer holds the lock; try again.
        ExhaustedError: no room for the sidecar; found before a byte is hashed.
        HeadlessError: not a segment, nor meant to be one.
        ManifestError: not a segment, or not one of ``expected``.
    """
    file = arena.file(name.slot)
    if not file.lock():
        raise SlotBusyError(f"slot {name.file_name} is still locked by its writer")
    try:
        arena.check_room(sidecar.length_bytes(file.length_bytes))
        if file.view[:8] == bytes(8):
            raise HeadlessError(f"slot {name.file_name} has no head")
        content = describe(file.view, owner=owner)
        shard = content.shard.id
        if expected and (shard.run, shard.generation, shard.rank) != expected:
            raise ManifestError(
                f"segment {shard.key} lies in a slot leased to run, attempt, rank {expected}"
            )
        left = recall(arena, name, len(file.view))
        if left and left.shard == content.shard:
            content = replace(content, owner=left.owner, source=left.source)
        finish(arena, name, content)
    finally:
        file.unlock()
    return content


def finish(arena: Arena, name: SlotName, content: Content) -> None:
    """Put the sidecar, then rename the closed slot to sealed.

    Raises:
        ConflictError: the slot was taken away meanwhile.
    """
    arena.write_sidecar(name, sidecar.encode(content))
    if not arena.rename(name, name.to(SlotState.SEALED)):
        raise ConflictError(f"slot {name.file_name} was taken away")


def note(arena: Arena, name: SlotName, content: Content) -> None:
    """Write a sealed slot's sidecar once more; go without it if the file system is full.

    Without it the next agent hashes the slot again, at the latest before it is restored from.
    """
    try:
        arena.write_sidecar(name, sidecar.encode(content))
    except ExhaustedError as error:
        log.warning("slot %s goes without a note: %s", name.file_name, error)


def describe(view: memoryview, *, owner: str) -> Content:
    """Return what a segment says of itself, with digests over all its bytes.

    Raises:
        ManifestError: not a segment.
    """
    length = min(header_length(bytes(view[:8])), len(view))
    identity = parse_header(view[:length], len(view)).identity
    digests = part_digests(view)
    shard = Shard(
        id=identity.id,
        job=identity.job,
        world_size=identity.world_size,
        plan_hash=identity.plan_hash,
        length_bytes=len(view),
        root_digest=root_digest(len(view), digests),
    )
    return Content(shard=shard, owner=owner, digests=b"".join(digests))


def intact(arena: Arena, name: SlotName, content: Content) -> bool:
    """Tell whether a sealed slot still has the bytes it was sealed with.

    On several cores: a rank waits for it, and nobody trains meanwhile.
    """
    return matches(arena, name, content.digests)


def matches(arena: Arena, name: SlotName, digests: bytes) -> bool:
    """Tell whether a slot's bytes have these part digests, joined; on several cores."""
    view = arena.file(name.slot).view
    with ThreadPoolExecutor(CHECK_THREADS_COUNT, thread_name_prefix="check") as pool:
        parts = (view[begin:end] for begin, end in part_ranges(len(view)))
        found = list(pool.map(part_digest, parts))
    return b"".join(found) == digests


def recall(arena: Arena, name: SlotName, length_bytes: int) -> Content | None:
    """Return what a sealed slot's sidecar says, None when it is missing or cannot be believed."""
    data = arena.read_sidecar(name)
    if data is None:
        return None
    try:
        return sidecar.decode(data, length_bytes)
    except CheckpointError:
        return None
