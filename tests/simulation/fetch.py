"""One fetch: from peers in turn, then from the object store, verified and sealed; an event each.

What ``agent.fetcher`` and ``agent.store_source`` do, over the arena of a ``Node``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.simulation import parity
from tests.simulation.segments import root
from tests.simulation.world import Do

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.inventory import Peer
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object, Rebuilt, Source
from holdfast.errors import CheckpointError, CorruptionError, NotFoundError
from holdfast.format import keys
from holdfast_services.agent.domain import Content, wanted_parts
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Rebuilding

if TYPE_CHECKING:
    from tests.simulation.node import Node

FETCH_S_MAX = 0.1


class Fetch:
    """Fills the slot of a ``Fetch`` action of this life of a node's agent, or says why not."""

    def __init__(self, node: Node, action: ev.Fetch) -> None:
        self._node, self._action = node, action
        self._life = node.life
        self._left = list(action.sources)
        self._bad: list[Source] = []

    def begin(self) -> None:
        """Ask the next source, if this agent still lives."""
        node = self._node
        if not node.alive(self._life):
            return
        if not self._left:
            self._failed("no source has it")
            return
        match self._left.pop(0):
            case Peer() as peer:
                self._from_peer(peer)
            case Rebuilding() as source:
                self._from_stripe(source)
            case Object():
                self._from_store()

    def _from_stripe(self, source: Rebuilding) -> None:
        shard = self._action.shard
        number = source.stripe.members.index(shard)

        def then(found: parity.Pieces) -> None:
            data = parity.rebuilt(source, number, found)
            if data is None:
                self.begin()
            elif root(data) != shard.root_digest:
                self._bad.append(Rebuilt(source.stripe))
                self.begin()
            else:
                self._filled(data, self._action.owner or self._node.name, "peer")

        parity.Collecting(self._node, source, then).begin()

    def _from_peer(self, source: Peer) -> None:
        node = self._node

        def take() -> Do | None:
            there = node.nodes[source.node]
            if there.state is None:
                return None
            slot = there.state.held(self._action.shard.id)
            file = there.file(slot.name) if slot else None
            if slot is None or file is None or file.shard != self._action.shard:
                return self.begin
            served, data = slot.name, file.data
            return lambda: self._soon(lambda: self._fetched(source, served, data))

        node.world.call(node.name, source.node, take, self.begin)

    def _soon(self, do: Do) -> None:
        if self._node.alive(self._life):
            self._node.soon(FETCH_S_MAX, do)

    def _fetched(self, source: Peer, served: SlotName, data: bytes) -> None:
        if root(data) != self._action.shard.root_digest:
            self._suspect(source, served)
            self._bad.append(Memory(source.node))
            self.begin()
            return
        tier = "memory" if self._action.asked else "peer"
        self._filled(data, self._action.owner or source.node, tier)

    def _suspect(self, source: Peer, served: SlotName) -> None:
        node = self._node

        def look() -> Do | None:
            there = node.nodes[source.node]
            if there.state is not None:
                there.feed(ev.Suspected(served))
            return lambda: None

        node.world.call(node.name, source.node, look, lambda: None)

    def _filled(self, data: bytes, owner: str, tier: str) -> None:
        node, shard = self._node, self._action.shard
        if self._action.parts:
            self._filled_parts(data, owner, tier)
            return
        file = node.file(self._action.name)
        if file is None:
            self._failed("the slot went")
            return
        file.data, file.key, file.shard = data, shard.id, shard
        file.world_size = shard.world_size
        file.name = file.name.to(SlotState.CLOSED)
        node.sealed(file, owner, tier)
        content = Content(shard=shard, owner=owner, digests=b"", source=tier)
        alike = None
        if self._action.filled:
            alike = node.world.rng.choice([0, shard.length_bytes])
        node.feed(ev.FetchDone(self._action.name, content, tuple(self._bad), alike))

    def _filled_parts(self, data: bytes, owner: str, tier: str) -> None:
        """Keep what was asked for, zeros for the rest; an agent that finds the file drops it."""
        node, shard, name = self._node, self._action.shard, self._action.name
        held = bytearray(len(data))
        for part in wanted_parts.ranges_of(self._action.parts, shard.length_bytes):
            held[part.begin : part.end] = data[part.begin : part.end]
        length_bytes = wanted_parts.length_of(self._action.parts, shard.length_bytes)
        if not node.make_partial(name, length_bytes, shard, bytes(held)):
            self._failed("no space left")
            return
        content = Content(shard=shard, owner=owner, digests=b"", source=tier)
        node.feed(ev.FetchDone(name, content, tuple(self._bad)))

    def _failed(self, reason: str, advice: str = "") -> None:
        self._node.feed(
            ev.FetchFailed(
                self._action.name, self._action.shard.id, reason, tuple(self._bad), advice
            )
        )

    def _from_store(self) -> None:
        if self._node.bucket is not None:
            self._soon(self._read)
        else:
            self.begin()

    def _read(self) -> None:
        shard, store = self._action.shard, self._node.bucket
        assert store is not None
        data = bytearray(shard.length_bytes)
        try:
            folder = CheckpointFolder(store, keys.folder(shard.job, shard.id.checkpoint))
            folder.fetch(
                shard, folder.sidecar(shard), memoryview(data), done=set(), threads=1,
                stop=threading.Event(),
            )  # fmt: skip
        except (CorruptionError, NotFoundError) as error:
            self._node.world.say(f"{self._node.name}: object store: {error.message}")
            self._bad.append(Object())
            self._failed("the object store has it not, or not intact")
        except CheckpointError as error:
            self._failed("the object store does not answer", error.message)
        else:
            self._filled(bytes(data), self._action.owner or self._node.name, "object")
