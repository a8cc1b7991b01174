"""A persistence worker: the real items, plans, uploads, manifests and deletions, one event each.

Between claim, plan, deed and acknowledgement others have their turn, and so has its death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.simulation.bucket import QUEUE_LEASE_S, Bucket, Queue
from tests.simulation.metadata import AGES, Fleet
from tests.simulation.node import Node
from tests.simulation.segments import root
from tests.simulation.world import Do, World

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.persistence_work import Work
from holdfast.core.queue_items import Item, parse
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError, InvalidRequestError, NotFoundError, UnavailableError
from holdfast.format.digest import part_digests
from holdfast_services.agent.domain import events as ev
from holdfast_services.kit.pace import Pace
from holdfast_services.kit.queue import Claim
from holdfast_services.metadata.usecases import workers
from holdfast_services.persistence.domain.upload_plan import Part
from holdfast_services.persistence.service import PersistService
from holdfast_services.persistence.source import Lent
from holdfast_services.persistence.worker import ITEM_WAITS, ITEMS_COUNT_MAX

T = TypeVar("T")
R = TypeVar("R")

LOOK_S = 0.3
REST_S_MAX = 3.0
DEED_S_MAX = 0.4


class Pool:
    """A ``PartPool`` without threads."""

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Do one after the other."""
        return [work(item) for item in items]

    @contextmanager
    def buffer(self, length_bytes: int) -> Iterator[memoryview]:
        """Lend new memory."""
        yield memoryview(bytearray(length_bytes))


class Copies:
    """The copies of a shard in the memory of nodes, as ``source.Sources`` gives them."""

    def __init__(self, worker: Worker, shard: Shard, peers: Iterable[Peer]) -> None:
        self._data = next(filter(None, (worker.read(peer, shard) for peer in peers)), None)
        self._shard = shard

    def digests(self) -> tuple[bytes, ...]:
        """Return the part digests."""
        return tuple(part_digests(memoryview(self._bytes())))

    @contextmanager
    def part(self, part: Part, stop: threading.Event) -> Iterator[Lent]:
        """Lend the bytes of a part."""
        yield Lent(memoryview(self._bytes())[part.begin : part.end], lambda: True)

    def close(self) -> None:
        """Nothing is held."""

    def _bytes(self) -> bytes:
        if self._data is None:
            raise UnavailableError(f"no copy of {self._shard.id.key} can be read")
        return self._data


class Metadata:
    """What ``persistence.clients.MetadataClient`` is: calls that are answered or lost."""

    def __init__(self, fleet: Fleet, worker: str) -> None:
        self._fleet, self._worker = fleet, worker

    def plan(self, item: str) -> Work:
        """Return what is to be done for an item now."""
        return self._fleet.ask(
            self._worker, lambda m: m.read(lambda c: workers.plan(c, item, AGES))
        )

    def is_durable(self, checkpoint: CheckpointId) -> bool:
        """Tell whether the catalogue relies on the checkpoint in the object store."""
        return self._fleet.ask(
            self._worker, lambda m: m.read(lambda c: workers.is_durable(c, checkpoint))
        )

    def shard_stored(self, shard: Shard) -> int:
        """Say that a shard lies in the store."""
        return self._change(lambda c, _: workers.shard_stored(c, shard))

    def durable(self, checkpoint: CheckpointId, manifest_digest: bytes) -> None:
        """Say that the manifest lies there."""
        self._change(lambda c, m: workers.durable(c, checkpoint, manifest_digest, m.limits))

    def collected(self, checkpoint: CheckpointId, freed_bytes: int) -> None:
        """Say that nothing of an expired checkpoint is left."""
        self._change(lambda c, _: workers.collected(c, checkpoint, freed_bytes))

    def scrubbed(self, checkpoint: CheckpointId, bad: Iterable[ShardId]) -> None:
        """Say what was read back."""
        self._change(lambda c, _: workers.scrubbed(c, checkpoint, list(bad)))

    def record(self, event: Event) -> None:
        """Tell people."""
        what = event.message.partition(":")[0]  # the rest says how fast it was
        self._fleet.world.say(f"{self._worker}: {event.kind}: {what}")

    def _change(self, use_case: Callable[[Any, Any], T]) -> T:
        def change(metadata: Any) -> T:
            answer: T = metadata.write(lambda c: use_case(c, metadata))
            self._fleet.changed(metadata)
            return answer

        return self._fleet.ask(self._worker, change)


class Worker:
    """One process that takes items, until it dies; ``start`` begins another under the same name."""

    def __init__(
        self, world: World, name: str, fleet: Fleet, bucket: Bucket, queue: Queue,
        nodes: dict[str, Node],
    ) -> None:  # fmt: skip
        self._world, self.name, self._queue, self._nodes = world, name, queue, nodes
        self._service = PersistService(
            bucket, Metadata(fleet, name), Pool(), Pace(0), Pace(0),  # type: ignore[arg-type]
            sources=lambda shard, peers, _: Copies(self, shard, peers), sleep=lambda _: None,
        )  # fmt: skip
        self.alive = False
        self._life = 0
        self._doing: dict[str, Claim] = {}

    def start(self) -> None:
        """Begin."""
        self.alive = True
        self._life += 1
        self._doing.clear()
        self._in(LOOK_S, self._look)
        self._in(QUEUE_LEASE_S / 3, self._beat)

    def kill(self) -> None:
        """End at once; claims run out."""
        self.alive = False

    def read(self, peer: Peer, shard: Shard) -> bytes | None:
        """Return the bytes of a node's copy, if it answers and they are right."""
        node = self._nodes[peer.node]
        there = node.state is not None and not self._world.frozen(peer.node)
        if not there or not self._world.passes(self.name, peer.node):
            return None
        assert node.state is not None
        slot = node.state.held(shard.id)
        file = node.files.get(slot.name.slot) if slot else None
        if slot is None or file is None or file.shard != shard:
            return None
        if root(file.data) != shard.root_digest:
            node.feed(ev.Suspected(slot.name))
            return None
        return file.data

    def _in(self, most_s: float, do: Do) -> None:
        life = self._life

        def turn() -> None:
            if self.alive and life == self._life:
                do()

        self._world.soon(most_s, turn, self.name)

    def _look(self) -> None:
        try:
            free = ITEMS_COUNT_MAX - len(self._doing)
            claims = self._queue.claim(self.name, count_max=free, wait_s=0.0) if free else ()
        except CheckpointError:
            claims = ()
        for claim in claims:
            self._doing[claim.token + claim.item] = claim
            self._in(0.01, lambda claim=claim: self._plan(claim))  # type: ignore[misc]
        self._in(2 * LOOK_S, self._look)

    def _beat(self) -> None:
        try:
            lost = self._queue.heartbeat(self.name, list(self._doing.values()))
            for claim in lost:
                self._doing.pop(claim.token + claim.item, None)
        except CheckpointError:
            pass
        self._in(2 * QUEUE_LEASE_S / 3, self._beat)

    def _plan(self, claim: Claim) -> None:
        try:
            item = parse(claim.item)
            plan = self._service.plan(item)
        except (InvalidRequestError, NotFoundError):
            self._settle(claim, lambda: self._queue.acknowledge(claim))
        except CheckpointError:
            self._settle(claim, lambda: self._later(claim))
        else:
            self._in(DEED_S_MAX, lambda: self._do(claim, item, plan))

    def _do(self, claim: Claim, item: Item, plan: Work) -> None:
        try:
            self._service.do(item, plan, threading.Event())
        except CheckpointError as error:
            self._world.say(f"{self.name}: {claim.item} failed: {error}"[:160])
            self._settle(claim, lambda: self._later(claim))
        else:
            self._in(0.02, lambda: self._settle(claim, lambda: self._queue.acknowledge(claim)))

    def _later(self, claim: Claim) -> None:
        self._queue.release(claim, delay_s=min(ITEM_WAITS.wait_s(claim.deliveries), REST_S_MAX))

    def _settle(self, claim: Claim, how: Do) -> None:
        """Say what became of a claim, unless it is another's by now."""
        if self._doing.pop(claim.token + claim.item, None) is None:
            return
        try:
            how()
        except CheckpointError:
            return  # it runs out by itself
