"""Makes elements of parity, and lost shards out of what is left of their stripes.

Both are sums (``summing``); what differs is which pieces, and what the result must match.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from holdfast.core.shard import Shard
from holdfast.errors import (
    CheckpointError,
    CorruptionError,
    DigestMismatchError,
    ManifestError,
    UnavailableError,
)
from holdfast.format import parity
from holdfast.format.digest import parts_count, root_digest, split_digests
from holdfast.format.segment import header_length
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Rebuilding
from holdfast_services.agent.summing import Opened, PieceError, Summing

log = logging.getLogger(__name__)

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(slots=True)
class Rebuild:
    """One lost shard: where it goes, which parts of it, and which came. ``done`` only grows."""

    shard: Shard
    target: memoryview
    done: set[int]


class ParityMaker:
    """Makes one sum after the other into memory that the caller owns.

    Args:
        summing: Opens pieces and sums them up.
        peers: Are told of pieces that are not good.
        in_thread: Runs what blocks.
    """

    def __init__(self, summing: Summing, peers: PeerClients, in_thread: InThread) -> None:
        self._summing = summing
        self._peers = peers
        self._in_thread = in_thread

    async def make(self, action: ev.MakeElement, target: memoryview) -> HeldSum:
        """Fill ``target`` with an element; return what it holds.

        Raises:
            CheckpointError: a member is not to be had, or not good: its holder was told.
        """
        stripe, reasons = action.members.stripe, list[str]()
        opened = await self._summing.open_pieces(stripe, action.members.pieces, reasons)
        by_number = {one.piece.number: one for one in opened if not one.piece.is_element}
        count = len(stripe.members)
        if len(by_number) < count:
            raise UnavailableError("; ".join(reasons) or "a member is with nobody")
        terms = [
            (term, by_number[term.number])
            for term in parity.terms_of_element(action.element.number, count)
        ]
        parts = range(parts_count(len(target)))
        try:
            digests = await self._in_thread(lambda: self._summing.fill(target, terms, parts))
        except PieceError as error:
            await self._tell(error)
            raise
        joined = tuple(digests[part] for part in parts)
        return HeldSum(
            element=action.element,
            root_digest=root_digest(len(target), joined),
            digests=b"".join(joined),
            member_digests=tuple(b"".join(by_number[i].digests) for i in range(count)),
        )

    async def rebuild(self, lost: Rebuild, source: Rebuilding, reasons: list[str]) -> bytes:
        """Fill in the parts of a lost shard that are not done; return its part digests, joined.

        Pieces that fail are left out, and others taken while there are enough.

        Raises:
            DigestMismatchError: the pieces are good and their sum is not the shard.
            CheckpointError: too few pieces can be had.
        """
        opened = await self._summing.open_pieces(source.stripe, source.pieces, reasons)
        wrong: DigestMismatchError | None = None
        while True:
            try:
                return await self._summed(lost, source, opened)
            except PieceError as error:
                reasons.append(str(error))
                await self._tell(error)
                opened = [one for one in opened if one is not error.opened]
            except DigestMismatchError as error:
                # An element that was made wrong: without the first there may be enough others.
                wrong = error
                first = next(one for one in opened if one.held is not None)
                opened = [one for one in opened if one is not first]
            except ValueError as cause:
                if wrong is not None:
                    raise wrong from cause
                text = "; ".join([*reasons, str(cause)])
                raise UnavailableError(f"{source.stripe.key}: {text}") from cause

    async def head(self, shard: Shard, source: Rebuilding) -> bytes:
        """Return the head of a lost shard's segment, out of those parts alone that have it.

        Raises:
            CheckpointError: it cannot be had.
        """
        every = set(range(parts_count(shard.length_bytes)))
        # Of the target only parts that come take memory.
        target = memoryview(mmap.mmap(-1, shard.length_bytes))
        lost, parts = Rebuild(shard, target, every - {0}), {0}
        while True:
            await self.rebuild(lost, source, [])
            length = header_length(bytes(target[:8]))
            if length > len(target):
                raise ManifestError(f"a head of {length} bytes in {len(target)}")
            more = set(range(parts_count(length))) - parts
            if not more:
                return bytes(target[:length])
            parts |= more
            lost.done -= more

    async def _summed(self, lost: Rebuild, source: Rebuilding, opened: Collection[Opened]) -> bytes:
        members = source.stripe.members
        by_piece = {(one.piece.is_element, one.piece.number): one for one in opened}
        terms = parity.terms_of_member(
            members.index(lost.shard),
            len(members),
            held=[number for is_element, number in by_piece if not is_element],
            elements=[number for is_element, number in by_piece if is_element],
        )
        summed = [(term, by_piece[term.is_element, term.number]) for term in terms]
        digests = self._digests_of(lost.shard, source, summed_over=[one for _, one in summed])
        parts = [part for part in range(len(digests)) if part not in lost.done]
        came = await self._in_thread(lambda: self._summing.fill(lost.target, summed, parts))
        good = {part for part in parts if came[part] == digests[part]}
        lost.done |= good
        if len(good) < len(parts):
            raise DigestMismatchError(f"{lost.shard.id.key} does not follow from its stripe")
        return b"".join(digests)

    def _digests_of(
        self, shard: Shard, source: Rebuilding, *, summed_over: Collection[Opened]
    ) -> tuple[bytes, ...]:
        """Return the part digests of a lost shard, as one of the elements knows them."""
        number = source.stripe.members.index(shard)
        for one in summed_over:
            if one.held is not None:
                digests = _proven(shard, one.held.member_digests[number])
                if digests is not None:
                    return digests
        raise DigestMismatchError(f"no element knows the digests of {shard.id.key}")

    async def _tell(self, error: PieceError) -> None:
        """Tell a holder that its piece does not match: it looks at it again."""
        if not error.corrupt:
            return
        one = error.opened
        log.warning("piece %s is bad: %s", one.key, error)
        try:
            if one.shard is not None:
                await self._peers.suspect(one.peer, one.shard.id, one.incarnation, one.length_bytes)
            else:
                await self._peers.suspect_element(
                    one.peer, one.key, one.incarnation, one.length_bytes
                )
        except CheckpointError as cause:
            log.info("could not tell %s: %s", one.peer.node, cause)


def _proven(shard: Shard, joined: bytes) -> tuple[bytes, ...] | None:
    """Return part digests if they give the root of the shard."""
    try:
        digests = split_digests(joined)
        return digests if root_digest(shard.length_bytes, digests) == shard.root_digest else None
    except ValueError:
        return None


def is_bad(error: CheckpointError) -> bool:
    """Tell whether a rebuild failed for good: the stripe does not have the shard."""
    return isinstance(error, CorruptionError)
