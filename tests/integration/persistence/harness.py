"""What the worker's tests use: segments, agents that serve them, a catalogue with scripted facts.

Agent and catalogue are real gRPC servers, and the data plane is the real one; what they know is
what the test says. The worker under test is the product's, in threads of the test's process.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.persistence_work import CheckpointWork, ShardWork, Work
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError, NotFoundError
from holdfast.format import keys
from holdfast.format.boxes import whole
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.objectstore import open_store
from holdfast.rpc import codec
from holdfast.rpc.status import TRAILER, to_status
from holdfast.v1 import agent_pb2 as agent
from holdfast.v1 import (
    agent_pb2_grpc,
    common_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    persistence_pb2_grpc,
)
from holdfast.v1 import persistence_pb2 as pb
from holdfast_services.kit.pace import Pace
from holdfast_services.kit.queue import open_queue
from holdfast_services.persistence.clients import MetadataClient
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.service import PersistService
from holdfast_services.persistence.source import sources_over
from holdfast_services.persistence.worker import Worker
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.tcp import TcpTransport

JOB = "team/job"
RUN = "r1"
WAIT_S = 30.0
LEASE_S = 2.0
MIB = 1 << 20


def until(met, what: str, wait_s: float = WAIT_S):
    """Poll until ``met()`` is truthy and return it."""
    deadline = time.monotonic() + wait_s
    while True:
        value = met()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {wait_s} s: {what}"
        time.sleep(0.01)


def segment(
    length: int, *, run=RUN, step=10, generation=1, rank=0, world=1, seed=0, change=()
) -> tuple[Shard, bytearray]:
    """Return a shard and its bytes: one tensor of ``length``; ``change`` are offsets of bytes
    that differ from what ``seed`` alone gives."""
    shard_id = ShardId(run, step, generation, rank)
    plan = f"plan{length}"
    spec = TensorSpec(fqn=f"w{rank}", dtype="U8", shape=(length,), box=whole((length,)))
    identity = SegmentIdentity(id=shard_id, job=JOB, world_size=world, plan_hash=plan)
    head = header_template(identity, [spec]).fill(step=step, generation=generation, parent=None)
    block = random.Random(seed).randbytes(min(length, MIB))
    data = bytearray(head + (block * (length // len(block) + 1))[:length])
    for at in range(len(head), len(data), MIB):
        data[at : at + 4] = at.to_bytes(4, "little")  # no two parts alike
    for at in change:
        data[at] ^= 0xFF
    root = root_digest(len(data), part_digests(memoryview(data)))
    shard = Shard(
        id=shard_id, job=JOB, world_size=world, plan_hash=plan,
        length_bytes=len(data), root_digest=root,
    )  # fmt: skip
    return shard, data


def _answer(context, work):
    try:
        return work()
    except CheckpointError as error:
        code, detail = to_status(error)
        context.set_trailing_metadata(((TRAILER, detail.SerializeToString()),))
        context.abort(code, detail.message)


class Holder(agent_pb2_grpc.ReplicationServicer):
    """A node that holds segments and serves them; with ``folder`` also as files of an arena."""

    def __init__(self, node: str = "a", folder: Path | None = None) -> None:
        self.node = node
        self.suspected: list[ShardId] = []
        self.folder = folder
        self._served = ServedSegments()
        self._held: dict[ShardId, tuple[Shard, SlotName, tuple[bytes, ...], str]] = {}
        self._transport = TcpTransport("127.0.0.1")
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        agent_pb2_grpc.add_ReplicationServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.peer = Peer(
            node=node,
            rpc_address=f"127.0.0.1:{port}",
            endpoints=self._transport.serve(self._served),
        )

    def hold(self, shard: Shard, data: bytearray, *, digests=None) -> Path | None:
        """Hold a copy; ``data`` may differ from what the digests say. Return its file."""
        name = SlotName(f"s{len(self._held)}", 1, SlotState.SEALED)
        sealed = tuple(digests or part_digests(memoryview(data)))
        path = None
        if self.folder is not None:
            path = self.folder / name.file_name
            path.write_bytes(data)
        self._served.put(shard.id.key, name, memoryview(data))
        self._held[shard.id] = (shard, name, sealed, str(path or ""))
        return path

    def drop(self, shard: Shard) -> None:
        """Reuse the slot: withdrawn, then renamed, then written."""
        _, name, _, path = self._held.pop(shard.id)
        self._served.withdraw(name)
        if path:
            Path(path).rename(path.replace(".seg", ".free"))

    def Locate(self, request, context):
        def work():
            wanted = codec.from_message(request.id, ShardId)
            if wanted not in self._held:
                raise NotFoundError("not held")
            shard, name, digests, path = self._held[wanted]
            return agent.LocateResponse(
                shard=codec.to_message(shard, common_pb2.Shard),
                slot_incarnation=name.incarnation,
                part_digests=b"".join(digests),
                path=path,
            )

        return _answer(context, work)

    def Suspect(self, request, context):
        self.suspected.append(codec.from_message(request.id, ShardId))
        return agent.SuspectResponse(quarantined=True)

    def close(self) -> None:
        self._server.stop(None).wait()
        self._transport.close()


@dataclass
class Facts:
    """What the catalogue knows of one checkpoint."""

    plan: CheckpointWork
    sources: tuple[Peer, ...] = ()
    earlier: tuple[CheckpointId, ...] = ()
    stored: set[ShardId] = field(default_factory=set)
    manifest_digest: bytes = b""


class Catalogue(persistence_pb2_grpc.PersistenceServicer, metadata_pb2_grpc.MetadataServicer):
    """Offers what is due and hears what was done, as the metadata service does."""

    def __init__(self) -> None:
        self.checkpoints: dict[CheckpointId, Facts] = {}
        self.plans: dict[str, Work] = {}
        self.events: list[Event] = []
        self.collected: list[tuple[CheckpointId, int]] = []
        self.scrubbed: list[tuple[CheckpointId, list[ShardId]]] = []
        self.refuse: list[CheckpointError] = []
        self.reports: list[ShardId] = []
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        persistence_pb2_grpc.add_PersistenceServicer_to_server(self, self._server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def drain(
        self, shards: Sequence[Shard], sources: Sequence[Peer], *, earlier=(), **fields
    ) -> CheckpointId:
        """Make a checkpoint due."""
        checkpoint = shards[0].id.checkpoint
        plan = CheckpointWork(
            checkpoint=checkpoint, job=JOB, shards=tuple(shards),
            created_at_s=1000.0, notes='{"loss": 0.5}', **fields,
        )  # fmt: skip
        self.checkpoints[checkpoint] = Facts(plan, tuple(sources), tuple(earlier))
        return checkpoint

    def due(self) -> dict[str, Work]:
        """Return all items that are still to be done, and what they stand for."""
        found = dict(self.plans)
        for checkpoint, facts in self.checkpoints.items():
            left = [shard for shard in facts.plan.shards if shard.id not in facts.stored]
            for shard in left:
                found[f"shard/{shard.id.key}"] = ShardWork(
                    shard=shard,
                    sources=facts.sources,
                    earlier=facts.earlier,
                    repair=facts.plan.repair,
                )
            if not left and not facts.manifest_digest:
                name = f"{checkpoint.run}/{checkpoint.step}/{checkpoint.generation}"
                found[f"manifest/{name}"] = facts.plan
        return found

    def durable(self, checkpoint: CheckpointId) -> bool:
        return bool(self.checkpoints[checkpoint].manifest_digest)

    def said(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def Plan(self, request, context):
        def work():
            plan = self.due().get(request.item)
            if plan is None:
                raise NotFoundError("nothing is due")
            if isinstance(plan, ShardWork):
                return pb.PlanResponse(shard=codec.to_message(plan, pb.ShardWork))
            if isinstance(plan, CheckpointWork):
                return pb.PlanResponse(checkpoint=codec.to_message(plan, pb.CheckpointWork))
            return pb.PlanResponse(sweep=codec.to_message(plan, pb.SweepWork))

        return _answer(context, work)

    def IsDurable(self, request, context):
        key = request.checkpoint
        return pb.IsDurableResponse(
            durable=f"scrub/{key.run}/{key.step}/{key.generation}" in self.plans
        )

    def ShardStored(self, request, context):
        shard = codec.from_message(request.shard, Shard)
        facts = self.checkpoints[shard.id.checkpoint]
        facts.stored.add(shard.id)
        self.reports.append(shard.id)
        return pb.ShardStoredResponse(missing=len(facts.plan.shards) - len(facts.stored))

    def Durable(self, request, context):
        def work():
            if self.refuse:
                raise self.refuse[0]
            checkpoint = codec.from_message(request.checkpoint, CheckpointId)
            self.checkpoints[checkpoint].manifest_digest = request.manifest_digest
            return pb.DurableResponse()

        return _answer(context, work)

    def Collected(self, request, context):
        checkpoint = codec.from_message(request.checkpoint, CheckpointId)
        self.collected.append((checkpoint, request.freed_bytes))
        name = f"/{checkpoint.run}/{checkpoint.step}/{checkpoint.generation}"
        self.plans = {item: p for item, p in self.plans.items() if not item.endswith(name)}
        return pb.CollectedResponse()

    def Scrubbed(self, request, context):
        checkpoint = codec.from_message(request.checkpoint, CheckpointId)
        bad = [codec.from_message(shard, ShardId) for shard in request.bad]
        self.scrubbed.append((checkpoint, bad))
        if checkpoint in self.checkpoints and not self.durable(checkpoint):
            self.checkpoints[checkpoint].stored -= set(bad)
        return pb.ScrubbedResponse()

    def Record(self, request, context):
        self.events += [codec.from_message(event, Event) for event in request.events]
        return metadata_pb2.RecordResponse()


class Running:
    """A worker of the product in threads of this process."""

    def __init__(
        self, catalogue: Catalogue, store, queue, *, name="w1", parts=4, rate=0, lease_s=LEASE_S
    ) -> None:
        self.metadata = MetadataClient(catalogue.address, name)
        self.pool = PartPool(parts)
        service = PersistService(
            store, self.metadata, self.pool, Pace(rate), Pace(0),
            sources=sources_over(TcpTransport()),
        )  # fmt: skip
        self.worker = Worker(name, queue, service, self.pool, lease_s)
        self._thread = threading.Thread(target=self.worker.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.worker.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.pool.close()
        self.metadata.close()


class Reconcile:
    """Offers what is due again and again, as metadata does."""

    def __init__(self, catalogue: Catalogue, queue) -> None:
        self._stop = threading.Event()
        self._catalogue, self._queue = catalogue, queue
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                self._queue.offer(sorted(self._catalogue.due()))
            except CheckpointError:
                continue

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)


@contextmanager
def draining(catalogue: Catalogue, store_url: str, queue_url: str, **options):
    """Run reconcile and one worker; yield the worker."""
    store = options.pop("store", None) or open_store(store_url)
    queue = open_queue(queue_url, lease_s=options.get("lease_s", LEASE_S))
    reconcile = Reconcile(catalogue, queue)
    running = Running(catalogue, store, queue, **options)
    try:
        yield running
    finally:
        running.stop()
        reconcile.stop()
        queue.close()
        store.close()


def read(store, shard: Shard) -> bytes:
    """Return the object of a shard."""
    key = keys.segment_key(JOB, shard.id, shard.world_size)
    data = bytearray(store.head(key).length_bytes)
    store.read_into(key, 0, memoryview(data))
    return bytes(data)


class Wrapped:
    """A store whose methods the test counts or breaks; the rest is the store itself."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.calls: list[tuple[str, tuple]] = []
        self.before = {}

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def called(*args, **kwargs):
            self.calls.append((name, args))
            if name in self.before:
                self.before[name](*args, **kwargs)
            return value(*args, **kwargs)

        return called

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in list(self.calls))
