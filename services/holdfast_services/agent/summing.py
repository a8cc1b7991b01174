"""Sums up pieces of a stripe that lie with other agents, or here: an element, or a lost shard.

All pieces of the sum are fetched side by side, ``WINDOW_PARTS`` parts of each at a time, so the
memory beside the target is one window for each. Each part is verified as it comes (P3).
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast.errors import CheckpointError, CorruptionError, ManifestError, UnavailableError
from holdfast.format.digest import PART_BYTES, part_digest, parts_count
from holdfast.format.parity import Term
from holdfast_services.agent import element_sidecar, isal
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain import HeldSum
from holdfast_services.agent.domain.state import GivenPiece
from holdfast_services.transport import Fetch, FetchRequest, Transport

WINDOW_PARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A piece that a peer says it has, with its digests: they give the root that is expected.

    ``shard`` is set of a member, ``held`` of an element.
    """

    piece: GivenPiece
    peer: Peer
    key: str
    incarnation: int
    length_bytes: int
    digests: tuple[bytes, ...]
    shard: Shard | None = None
    held: HeldSum | None = None


class PieceError(UnavailableError):
    """A piece could not be fetched; ``corrupt``: its bytes do not match."""

    def __init__(self, opened: Opened, cause: CheckpointError) -> None:
        super().__init__(f"{opened.peer.node}: {cause}")
        self.opened = opened
        self.corrupt = isinstance(cause, CorruptionError)


class Summing:
    """Opens pieces and sums them up; ``stop`` interrupts what is under way."""

    def __init__(self, transport: Transport, peers: PeerClients, stop: threading.Event) -> None:
        self._transport = transport
        self._peers = peers
        self._stop = stop

    async def open_pieces(
        self, stripe: Stripe, pieces: Sequence[GivenPiece], reasons: list[str]
    ) -> list[Opened]:
        """Return those that can be had, in their order; why others cannot goes to ``reasons``."""
        found = await asyncio.gather(*(self._open(stripe, piece, reasons) for piece in pieces))
        return [opened for opened in found if opened is not None]

    async def _open(self, stripe: Stripe, piece: GivenPiece, reasons: list[str]) -> Opened | None:
        for peer in piece.peers:
            try:
                if piece.is_element:
                    return await self._open_element(stripe, piece, peer)
                return await self._open_member(stripe.members[piece.number], piece, peer)
            except CheckpointError as error:
                reasons.append(f"{peer.node}: {error}")
        return None

    async def _open_member(self, shard: Shard, piece: GivenPiece, peer: Peer) -> Opened:
        located = await self._peers.locate(peer, shard.id)
        located.check(shard)
        return Opened(
            piece=piece,
            peer=peer,
            key=shard.id.key,
            incarnation=located.slot_incarnation,
            length_bytes=shard.length_bytes,
            digests=located.digests,
            shard=shard,
        )

    async def _open_element(self, stripe: Stripe, piece: GivenPiece, peer: Peer) -> Opened:
        element = Element(stripe=stripe, number=piece.number)
        held, incarnation = await self._peers.locate_element(peer, element)
        if held.root_digest != piece.root_digest:
            raise ManifestError(f"{element.key} is another element there")
        element_sidecar.check(held, stripe.length_bytes)
        return Opened(
            piece=piece,
            peer=peer,
            key=element.key,
            incarnation=incarnation,
            length_bytes=stripe.length_bytes,
            digests=element_sidecar.parts_of(held),
            held=held,
        )

    def fill(
        self, target: memoryview, terms: Sequence[tuple[Term, Opened]], parts: Collection[int]
    ) -> dict[int, bytes]:
        """Make these parts of ``target`` the sum; return their digests. Blocking.

        Raises:
            PieceError: of the first piece that could not be had, or was not good.
            StoppedError: ``stop`` was set.
        """
        digests: dict[int, bytes] = {}
        window = WINDOW_PARTS * PART_BYTES
        rooms = [memoryview(mmap.mmap(-1, min(window, one.length_bytes))) for _, one in terms]
        with ThreadPoolExecutor(len(terms), thread_name_prefix="piece") as threads:
            for first, last in _windows(parts):
                begin, until = first * PART_BYTES, (last + 1) * PART_BYTES
                end = min(until, len(target))
                coming = [
                    threads.submit(self._fetch, one, room, begin, until)
                    for (_, one), room in zip(terms, rooms, strict=True)
                ]
                came = [one.result() for one in coming]
                pieces = [
                    (term.weight, room[:length])
                    for (term, _), room, length in zip(terms, rooms, came, strict=True)
                ]
                isal.write_sum(target[begin:end], pieces)
                for part in range(first, last + 1):
                    bytes_of = target[part * PART_BYTES : min((part + 1) * PART_BYTES, end)]
                    digests[part] = part_digest(bytes_of)
        return digests

    def _fetch(self, opened: Opened, room: memoryview, begin: int, end: int) -> int:
        """Fetch what a piece has of ``begin`` to ``end``; return how many bytes that are.

        Whole parts of it, though the sum may end before: only these have digests.
        """
        length = min(end, opened.length_bytes) - begin
        if length <= 0:
            return 0
        first = begin // PART_BYTES
        request = FetchRequest(
            key=opened.key,
            incarnation=opened.incarnation,
            length_bytes=length,
            digests=opened.digests[first : first + parts_count(length)],
            offset_bytes=begin,
        )
        try:
            fetch = Fetch(request, room[:length], stop=self._stop)
            self._transport.fetch(opened.peer.endpoints, fetch)
        except CheckpointError as error:
            raise PieceError(opened, error) from error
        return length


def _windows(parts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last part of runs of ``parts``, none longer than a window."""
    for _, run in groupby(enumerate(sorted(parts)), lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        for at in range(0, len(numbers), WINDOW_PARTS):
            yield numbers[at], numbers[min(at + WINDOW_PARTS, len(numbers)) - 1]
