"""Heads of the segments of a checkpoint: from here, from other nodes, from the object store.

One that nobody has is made out of the rest of its stripe, if that is enough.

A rank works out from them which bytes it needs (``format.byte_ranges``), before any is fetched.
Nothing here verifies them, and nobody needs to: they say what is fetched, and what is loaded is
verified, header included (P3). A false one costs that the rank fetches more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Peer
from holdfast.core.needs import HEADS_BYTES_MAX, Head
from holdfast.core.node_view import NodeView
from holdfast.errors import CheckpointError, ManifestError
from holdfast.format.segment import header_length
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain import State
from holdfast_services.agent.domain.fetch_wishes import heads
from holdfast_services.agent.parity_maker import ParityMaker
from holdfast_services.agent.shell import Shell
from holdfast_services.agent.store_source import ObjectTier

PEERS_COUNT_MAX = 16
"""How many nodes are asked at a time."""
FIND_S_MAX = 10.0
"""How long nodes of the job are asked again that were silent, or are not known to be there yet."""
AGAIN_S = 1.0

log = logging.getLogger(__name__)


class HeadFinder:
    """Finds heads for the ranks of this node, and reads those of its segments for other nodes."""

    def __init__(
        self, *, shell: Shell, arena: Arena, peers: PeerClients, tier: ObjectTier,
        parity: ParityMaker,
    ) -> None:  # fmt: skip
        self._shell = shell
        self._arena = arena
        self._peers = peers
        self._tier = tier
        self._parity = parity

    def read(self, checkpoint: CheckpointId, ranks: Collection[int]) -> Sequence[Head]:
        """Return the heads of those segments that lie here, ``HEADS_BYTES_MAX`` at most."""
        wanted, left_bytes = frozenset(ranks), HEADS_BYTES_MAX
        found: list[Head] = []
        for shard, slot in self._shell.state.copies().items():
            if shard.checkpoint != checkpoint or shard.rank not in wanted:
                continue
            view = self._arena.file(slot.name.slot).view
            length_bytes = _head_length(view)
            if 0 < length_bytes <= left_bytes:
                left_bytes -= length_bytes
                data = bytes(view[:length_bytes])
                found.append(Head(rank=int(shard.rank), length_bytes=len(view), data=data))
        return found

    async def find(
        self, job: str, checkpoint: CheckpointId, ranks: Collection[int]
    ) -> Sequence[Head]:
        """Return the heads of these ranks' segments, or of those that are found.

        Other nodes are asked from the next one on: who holds copies of a node's segments is near.
        """
        until_s = time.monotonic() + FIND_S_MAX
        while True:
            found, heard = await self._look(job, checkpoint, ranks)
            run, view = self._shell.state.run(checkpoint.run), self._shell.state.view
            all_heard = heard >= {*(run.ring if run else ())} - {self._shell.state.me.node}
            if all_heard or len(found) >= len(set(ranks)) or time.monotonic() >= until_s:
                return found
            await self._shell.until(partial(self._is_news, view), AGAIN_S)

    def _is_news(self, seen: NodeView | None) -> bool:
        return self._shell.state.view is not seen

    async def _look(
        self, job: str, checkpoint: CheckpointId, ranks: Collection[int]
    ) -> tuple[Sequence[Head], set[str]]:
        """Return what is found now, and which nodes have answered."""
        found = {head.rank: head for head in self.read(checkpoint, ranks)}
        left = set(ranks) - found.keys()
        heard: set[str] = set()
        peers = _from_next(self._shell.state)
        while left and peers:
            asked, peers = peers[:PEERS_COUNT_MAX], peers[PEERS_COUNT_MAX:]
            answers = await asyncio.gather(*(self._ask(p, checkpoint, left) for p in asked))
            for peer, answer in zip(asked, answers, strict=True):
                if answer is not None:
                    heard.add(peer.node)
                    found |= {head.rank: head for head in answer if head.rank in left}
            left -= found.keys()
        if left:
            in_store = await asyncio.to_thread(self._in_store, job, checkpoint, left)
            found |= {head.rank: head for head in in_store}
            found |= await self._made(checkpoint, left - found.keys())
        return list(found.values()), heard

    async def _made(self, checkpoint: CheckpointId, ranks: Collection[int]) -> Mapping[int, Head]:
        """Return heads that nobody has, one after the other: each costs some parts of a stripe."""
        lost, left_bytes = heads(self._shell.state, checkpoint), HEADS_BYTES_MAX
        found: dict[int, Head] = {}
        for rank in sorted(lost.keys() & ranks):
            shard, source = lost[rank]
            try:
                data = await self._parity.head(shard, source)
            except CheckpointError as error:
                log.info("no header of rank %d from its stripe: %s", rank, error)
                continue
            if len(data) > left_bytes:
                break
            left_bytes -= len(data)
            found[rank] = Head(rank=rank, length_bytes=shard.length_bytes, data=data)
        return found

    async def _ask(
        self, peer: Peer, checkpoint: CheckpointId, ranks: Collection[int]
    ) -> Sequence[Head] | None:
        try:
            return await self._peers.read_heads(peer, checkpoint, ranks)
        except CheckpointError as error:
            log.info("no headers from node %s: %s", peer.node, error)
            return None

    def _in_store(
        self, job: str, checkpoint: CheckpointId, ranks: Collection[int]
    ) -> Sequence[Head]:
        try:
            return self._tier.heads(job, checkpoint, ranks)
        except CheckpointError as error:
            log.info("no headers from the object store: %s", error)
            return ()


def _head_length(view: memoryview) -> int:
    """Return how long the head of a segment is; 0: its bytes turned bad, and it has none."""
    try:
        return min(header_length(bytes(view[:8])), len(view))
    except ManifestError as error:
        log.warning("a segment of %d bytes has no header: %s", len(view), error)
        return 0


def _from_next(state: State) -> Sequence[Peer]:
    """Return the other live nodes in the order of their names, beginning after this one."""
    peers = sorted(state.view.nodes if state.view else (), key=lambda peer: peer.node)
    after = [peer for peer in peers if peer.node > state.me.node]
    before = [peer for peer in peers if peer.node < state.me.node]
    return [*after, *before]
