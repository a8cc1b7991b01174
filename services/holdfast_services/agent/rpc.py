"""The agent's two gRPC services: decode, call, encode. No rule lives here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import grpc.aio

import holdfast
from holdfast.core.attempts import AttemptSpec, check
from holdfast.core.budget import MemoryWish, Reservation
from holdfast.core.ids import CheckpointId, ShardId, job_name, node_name, run_id, session_id
from holdfast.core.inventory import Peer
from holdfast.core.needs import HEADS_BYTES_MAX, Head
from holdfast.core.needs import checked as checked_needs
from holdfast.core.reports import checked
from holdfast.core.rounds import LaunchRequest
from holdfast.core.session import SessionUpdate
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError
from holdfast.rpc import codec, protocol
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import agent_pb2_grpc, common_pb2, metadata_pb2
from holdfast_services.agent.launchers import Launchers
from holdfast_services.agent.segment_heads import HeadFinder
from holdfast_services.agent.service import AgentService

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AgentRpc(agent_pb2_grpc.AgentServicer):
    """The service for the trainers of this node, on the unix socket."""

    def __init__(self, service: AgentService, heads: HeadFinder, launchers: Launchers) -> None:
        self._service = service
        self._heads = heads
        self._launchers = launchers

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Context
    ) -> common_pb2.HandshakeResponse:
        """Return the versions of this agent."""
        return _handshake()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Return name and size of this node, and whether a job that begins fits there."""
        wish = codec.from_message(request.wish, MemoryWish)
        return pb.DescribeResponse(**asdict(self._service.describe(request.job, wish)))

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        """Register a rank with metadata and open its session."""
        spec = codec.from_message(request.spec, AttemptSpec)
        check(spec)
        seat = await self._service.open_session(session_id(request.session), spec)
        return pb.OpenSessionResponse(
            seat=codec.to_message(seat, common_pb2.Seat),
            node=self._service.node,
            arena=self._service.arena_folder,
        )

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        """Reserve slots; RESOURCE_EXHAUSTED writes the sum out."""
        asked = Reservation(
            plan_hash=request.plan_hash,
            length_bytes=request.length_bytes,
            slots=request.slots,
            restored_bytes=request.restored_bytes,
            twins=request.twins,
        )
        making = await self._service.reserve(request.session, asked)
        return pb.ReserveResponse(making=making)

    async def Watch(self, request: pb.SessionWatchRequest, context: Context) -> pb.SessionView:
        """Answer when the session's view differs, or at the deadline."""
        view = await self._service.watch(request.session, request.version, request.wait_s)
        return codec.to_message(view, pb.SessionView)

    async def Update(self, request: pb.UpdateRequest, context: Context) -> pb.UpdateResponse:
        """Take the update of a rank."""
        update = codec.from_message(request, SessionUpdate)
        needs = checked_needs(update.needs) if update.needs else None
        self._service.update(replace(update, report=checked(update.report), needs=needs))
        return pb.UpdateResponse()

    async def FindHeads(self, request: pb.HeadsRequest, context: Context) -> pb.HeadsResponse:
        """Find heads of segments, here or elsewhere."""
        job, checkpoint = job_name(request.job), _checkpoint(request)
        return _heads(await self._heads.find(job, checkpoint, request.ranks))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """End a session."""
        self._service.close_session(session_id(request.session))
        return pb.CloseSessionResponse()

    async def Launch(
        self, request: metadata_pb2.LaunchRequest, context: Context
    ) -> metadata_pb2.LaunchView:
        """Pass a launcher's report on to metadata, and its answer back."""
        view = await self._launchers.ask(codec.from_message(request, LaunchRequest))
        return codec.to_message(view, metadata_pb2.LaunchView)

    async def Dump(self, request: pb.DumpRequest, context: Context) -> pb.DumpResponse:
        """Return the whole state, for people."""
        return pb.DumpResponse(json=json.dumps(self._service.dump(), indent=1))


class ReplicationRpc(agent_pb2_grpc.ReplicationServicer):
    """The service for other agents, on TCP."""

    def __init__(self, service: AgentService, heads: HeadFinder) -> None:
        self._service = service
        self._heads = heads

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Context
    ) -> common_pb2.HandshakeResponse:
        """Return the versions of this agent."""
        return _handshake()

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        """Fetch a shard from its owner and hold it."""
        source = codec.from_message(request.source, Peer)
        node_name(source.node)
        held = await self._service.hold(_shard(request.shard), source)
        return pb.HoldResponse(coming=not held)

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        """Return where a copy is and what its part digests are, for whoever fetches it."""
        found = self._service.locate(codec.from_message(request.id, ShardId))
        return codec.to_message(found, pb.LocateResponse)

    async def Suspect(self, request: pb.SuspectRequest, context: Context) -> pb.SuspectResponse:
        """Hash a copy again whose bytes did not match at another node."""
        shard = codec.from_message(request.id, ShardId)
        quarantined = await self._service.suspect(shard, request.slot_incarnation)
        return pb.SuspectResponse(quarantined=quarantined)

    async def LocateElement(
        self, request: pb.LocateElementRequest, context: Context
    ) -> pb.LocateElementResponse:
        """Return where an element is, its digests and those of its members."""
        held, incarnation = self._service.locate_element(request.key)
        return pb.LocateElementResponse(
            root_digest=held.root_digest,
            slot_incarnation=incarnation,
            part_digests=held.digests,
            member_digests=held.member_digests,
        )

    async def SuspectElement(
        self, request: pb.SuspectElementRequest, context: Context
    ) -> pb.SuspectElementResponse:
        """Hash an element again whose bytes did not match at another node."""
        dropped = await self._service.suspect_element(request.key, request.slot_incarnation)
        return pb.SuspectElementResponse(dropped=dropped)

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        """Hash the held copy again."""
        detail, length_bytes = await self._service.verify(codec.from_message(request.id, ShardId))
        return pb.VerifyResponse(ok=not detail, detail=detail, length_bytes=length_bytes)

    async def ReadHeads(self, request: pb.HeadsRequest, context: Context) -> pb.HeadsResponse:
        """Read heads of segments that lie here."""
        return _heads(self._heads.read(_checkpoint(request), request.ranks))


def _handshake() -> common_pb2.HandshakeResponse:
    return common_pb2.HandshakeResponse(
        software_version=holdfast.__version__,
        protocol_min=protocol.PROTOCOL_MIN,
        protocol_max=protocol.PROTOCOL,
    )


def _checkpoint(request: pb.HeadsRequest) -> CheckpointId:
    checkpoint = codec.from_message(request.checkpoint, CheckpointId)
    run_id(checkpoint.run)
    return checkpoint


def _heads(found: Iterable[Head]) -> pb.HeadsResponse:
    """Return as many of them as one answer may hold."""
    heads, left_bytes = [], HEADS_BYTES_MAX
    for head in found:
        if len(head.data) <= left_bytes:
            left_bytes -= len(head.data)
            heads.append(codec.to_message(head, pb.Head))
    return pb.HeadsResponse(heads=heads)


def _shard(message: common_pb2.Shard) -> Shard:
    """Return a shard whose names are checked: they come from a peer (P9)."""
    shard = codec.from_message(message, Shard)
    run_id(shard.id.run)
    job_name(shard.job)
    if shard.length_bytes <= 0:
        raise InvalidRequestError(f"shard {shard.id.key} has {shard.length_bytes} bytes")
    return shard
