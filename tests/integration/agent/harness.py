"""What the agent's tests use: an agent process, a trainer process, a catalogue to write by hand."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
from tests.servers.nursery import Child
from tests.servers.services import SERVICES

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Inventory
from holdfast.core.node_view import (
    Committed,
    ElementWant,
    NodeView,
    RunView,
    Want,
    WantReason,
)
from holdfast.core.session import SessionView
from holdfast.core.sources import Memory, Object
from holdfast.core.user_events import Event
from holdfast.format import keys
from holdfast.format import sidecar as bucket_sidecar
from holdfast.format.digest import part_digests
from holdfast.format.sidecar import Sidecar
from holdfast.rpc import codec
from holdfast.rpc.channel import call, sync_channel, unix_target
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import agent_pb2_grpc, common_pb2, metadata_pb2, metadata_pb2_grpc

WAIT_S = 20.0
ROOT = Path(__file__).resolve().parents[3]
RUN = "r1"


def until(met, what: str, wait_s: float = WAIT_S):
    """Poll until ``met()`` is truthy and return it."""
    deadline = time.monotonic() + wait_s
    while True:
        value = met()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {wait_s} s: {what}"
        time.sleep(0.02)


class Catalogue(metadata_pb2_grpc.MetadataServicer):
    """Keeps the last inventory of each node; answers with the views that the test sets."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.inventories: dict[str, Inventory] = {}
        self.views: dict[str, NodeView] = {}
        self.common = NodeView(version="0")
        self.generation = 1
        self.generations: dict[bytes, int] = {}
        self.events: list[Event] = []
        self.registrations: list[metadata_pb2.RegisterRankRequest] = []
        self.port = 0
        self._version = 0
        self._news = threading.Condition()
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        metadata_pb2_grpc.add_MetadataServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"{self.host}:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def set_run(
        self,
        wants: dict[str, tuple[Want, ...]] | None = None,
        elements: dict[str, tuple[ElementWant, ...]] | None = None,
        spare_elements: dict[str, tuple[str, ...]] | None = None,
        **fields,
    ) -> None:
        """Change the run's view and what nodes should fetch, make and spare; peers are all."""
        with self._news:
            before = (
                self.common.runs[0]
                if self.common.runs
                else RunView(run=RUN, job="job", generation=self.generation, world_size=1)
            )
            run = replace(before, **fields)
            peers = tuple(i.node for i in self.inventories.values() if not i.leaving)
            self._version += 1
            self.common = NodeView(version=str(self._version), nodes=peers, runs=(run,))
            self.views = {
                node: replace(
                    self.common,
                    wants=(wants or {}).get(node, ()),
                    elements=(elements or {}).get(node, ()),
                    spare_elements=(spare_elements or {}).get(node, ()),
                )
                for node in self.inventories
            }
            self._news.notify_all()

    def view(self, node: str) -> NodeView:
        return self.views.get(node, replace(self.common, wants=()))

    def RegisterRank(self, request, context):
        self.registrations.append(request)
        known = self.generations.setdefault(request.spec.nonce, len(self.generations) + 1)
        return metadata_pb2.RegisterRankResponse(seat={"run": RUN, "generation": known})

    def Report(self, request, context):
        inventory = codec.from_message(request, Inventory)
        with self._news:
            known = self.inventories.get(inventory.node.node)
            if known and known.incarnation > inventory.incarnation:
                old = NodeView(version="", incarnation_min=known.incarnation + 1)
                return codec.to_message(old, metadata_pb2.NodeView)
            self.inventories[inventory.node.node] = inventory
            return codec.to_message(self.view(inventory.node.node), metadata_pb2.NodeView)

    def Watch(self, request, context):
        with self._news:
            self._news.wait_for(
                lambda: self.view(request.node).version != request.version, min(request.wait_s, 2)
            )
            return codec.to_message(self.view(request.node), metadata_pb2.NodeView)

    def Record(self, request, context):
        self.events += [codec.from_message(event, Event) for event in request.events]
        return metadata_pb2.RecordResponse()

    def held(self, node: str) -> dict[ShardId, object]:
        inventory = self.inventories.get(node)
        return {s.shard.id: s for s in inventory.shards} if inventory else {}

    def elements(self, node: str) -> dict[str, object]:
        inventory = self.inventories.get(node)
        return {held.element.key: held for held in inventory.elements} if inventory else {}

    def said(self, kind: str) -> list[str]:
        return [event.message for event in self.events if event.kind == kind]


def reported(catalogue: Catalogue, *names: str) -> None:
    """Wait until all these nodes have sent an inventory."""
    until(lambda: all(name in catalogue.inventories for name in names), "reported")


def restart(a: Node, catalogue: Catalogue) -> None:
    """Kill an agent, start it again, wait for its first inventory."""
    a.kill()
    before = catalogue.inventories[a.name].incarnation
    a.start()
    until(lambda: catalogue.inventories[a.name].incarnation > before, "reported again")


def want(
    shard, *nodes: str, reason=WantReason.RESTORE, stored: bool = False, owner: str = ""
) -> Want:
    stores = [Object()] if stored else []
    return Want(shard=shard, sources=(*map(Memory, nodes), *stores), reason=reason, owner=owner)


class Node:
    """One agent process: forked, or started from nothing by the command ``under``."""

    def __init__(
        self, name: str, folder: Path, metadata: str, environ: dict[str, str],
        under: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self._under = under
        self.folder = folder
        self.arena = folder / "arena"
        self.socket = folder / "s" / "agent.sock"
        self._ready = folder / "ready.json"
        self._environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}",
            "HOLDFAST_NODE": name,
            "HOLDFAST_ADDRESS": metadata,
            "HOLDFAST_AGENT": str(self.socket),
            "HOLDFAST_ARENA": str(self.arena),
            "HOLDFAST_BUDGET": "256M",
            "HOLDFAST_READY_FILE": str(self._ready),
            **environ,
        }
        self.process: subprocess.Popen[bytes] | Child | None = None

    def spawn(self) -> subprocess.Popen[bytes] | Child:
        self.folder.mkdir(exist_ok=True)
        self._ready.unlink(missing_ok=True)
        words, log = ("holdfast_services.agent",), self.folder / "log"
        if not self._under:
            self.process = SERVICES.start(*words, env=self._environ, log=log, folder=self.folder)
            return self.process
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*self._under, sys.executable, "-m", *words],
                env=self._environ, stdout=out, stderr=out, cwd=self.folder,
            )  # fmt: skip
        return self.process

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def wait_ready(self, wait_s: float = WAIT_S) -> None:
        until(
            lambda: self._ready.exists() or self.process.poll() is not None,
            "agent is ready",
            wait_s,
        )
        assert self._ready.exists(), self.log_text()
        self.ready = json.loads(self._ready.read_text())

    def log_text(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def call(self, method: str, request):
        with sync_channel(unix_target(self.socket)) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)
            return call(getattr(stub, method), request, timeout_s=WAIT_S)

    def call_peer(self, method: str, request):
        with sync_channel(self.ready["rpc_address"]) as channel:
            stub = agent_pb2_grpc.ReplicationStub(channel)
            return call(getattr(stub, method), request, timeout_s=WAIT_S)

    def view(self, session: str, version: str = "") -> SessionView:
        request = pb.SessionWatchRequest(session=session, version=version, wait_s=1)
        return codec.from_message(self.call("Watch", request), SessionView)

    def dump(self) -> dict:
        return json.loads(self.call("Dump", pb.DumpRequest()).json)

    def files(self, suffix: str) -> list[str]:
        return sorted(p.name for p in self.arena.glob(f"*.{suffix}"))


class Trainer:
    """A process that holds session and slot locks as the SDK does; see ``trainer.py``."""

    def __init__(self, arena: Path, session: str) -> None:
        self.session = session
        (hears, says), (reads, writes) = os.pipe(), os.pipe()
        _, orders = nursery()
        socket.send_fds(orders, [f"{arena}\n{session}".encode()], [hears, writes])
        self._ends = os.pidfd_open(int(orders.recv(64)))
        os.close(hears)
        os.close(writes)
        self._input, self._output = os.fdopen(says, "w"), os.fdopen(reads)
        assert self.read() == "locked"

    def read(self) -> str:
        return self._output.readline().strip()

    def ask(self, *words: object) -> str:
        self.send(*words)
        return self.read()

    def send(self, *words: object) -> None:
        self._input.write(" ".join(map(str, words)) + "\n")
        self._input.flush()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._ends, number)

    def wait(self, wait_s: float) -> bool:
        """Return once it has ended, or after so long; tell whether it has."""
        return bool(select.select([self._ends], [], [], wait_s)[0])

    def end(self) -> None:
        if self._input.closed:
            return
        self.signal(signal.SIGKILL)
        assert self.wait(WAIT_S), "a trainer that was killed lives on"
        os.close(self._ends)
        self._output.close()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()


@functools.cache
def nursery() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return what forks trainers, and how it is told to; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trainer.py"))],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "sdk")},
            stdin=theirs,
        )
    return process, ours


def open_session(node: Node, session: str, *, nonce: bytes = b"n" * 16, **fields) -> int:
    """Open a session; return its generation."""
    request = {"rank": 0, "world_size": 1, "local_world_size": 1, "replicas": 0, **fields}
    answer = node.call(
        "OpenSession",
        pb.OpenSessionRequest(
            session=session,
            spec={"job": "job", "nonce": nonce, "launcher": "l", "holder": "h", **request},
        ),
    )
    return answer.seat.generation


def reserve(node: Node, session: str, length: int, slots: int = 2, checkpoint: int = 0) -> None:
    node.call(
        "Reserve",
        pb.ReserveRequest(
            session=session,
            plan_hash="p" * 32,
            length_bytes=length,
            slots=slots,
            restored_bytes=checkpoint or length,
        ),
    )


def decision(shards, *, number=1, generation=2, state=DecisionState.PROPOSED) -> Decision:
    first = shards[0].id
    return Decision(
        number=number,
        state=state,
        generation=generation,
        checkpoint=CheckpointId(first.run, first.step, first.generation),
        shards=tuple(shards),
        shards_count=len(shards),
    )


def committed(step: int, generation: int = 1, *, replicated: bool = False) -> Committed:
    return Committed(checkpoint=CheckpointId(RUN, step, generation), replicated=replicated)


def shard_message(shard) -> common_pb2.Shard:
    return codec.to_message(shard, common_pb2.Shard)


def segment_key(shard):
    return keys.segment_key(shard.job, shard.id, shard.world_size)


def sidecar_key(shard):
    return keys.sidecar_key(shard.job, shard.id, shard.world_size)


def upload(store, shard, data):
    """Put a shard where a worker would have put it."""
    store.put(segment_key(shard), data)
    sidecar = Sidecar(shard=shard, digests=tuple(part_digests(memoryview(data))))
    store.put(sidecar_key(shard), bucket_sidecar.encode(sidecar))


def bytes_of(node, shard):
    """What the arena holds of a shard, by its sidecar there."""
    for path in node.arena.glob("*.sum"):
        if json.loads(path.read_text())["shard"] == shard.id.key:
            return path.with_suffix(".seg").read_bytes()
    raise AssertionError(f"{shard.id.key} is not in {node.arena}")
