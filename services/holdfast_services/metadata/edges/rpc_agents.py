"""The gRPC edge: decode, call, encode. No rule, no SQL, no status codes."""

from __future__ import annotations

from typing import Any

import grpc.aio

import holdfast
from holdfast.core.inventory import Inventory
from holdfast.core.rounds import LaunchRequest
from holdfast.core.user_events import Event
from holdfast.rpc.codec import from_message, to_message
from holdfast.rpc.protocol import PROTOCOL, PROTOCOL_MIN
from holdfast.v1 import common_pb2 as common
from holdfast.v1 import metadata_pb2 as pb
from holdfast.v1.metadata_pb2_grpc import MetadataServicer
from holdfast_services.metadata.calls.launches import Launches
from holdfast_services.metadata.calls.registrations import Registrations
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.domain.attempts import Registration
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents

Context = grpc.aio.ServicerContext[Any, Any]


class MetadataRpc(MetadataServicer):
    """Serves ``holdfast.v1.Metadata``; ``rest_url`` is what a handshake answers."""

    def __init__(
        self,
        transactor: Transactor,
        registrations: Registrations,
        reports: Reports,
        launches: Launches,
        rest_url: str,
    ) -> None:
        self._transactor = transactor
        self._registrations = registrations
        self._reports = reports
        self._launches = launches
        self._rest_url = rest_url

    async def Handshake(
        self, request: common.HandshakeRequest, context: Context
    ) -> common.HandshakeResponse:
        """Return the versions of this service and the address of REST."""
        del request, context
        return greeting(self._rest_url)

    async def RegisterRank(
        self, request: pb.RegisterRankRequest, context: Context
    ) -> pb.RegisterRankResponse:
        """Seat one rank of an attempt."""
        del context
        seat = await self._registrations.register(from_message(request, Registration))
        return pb.RegisterRankResponse(seat=to_message(seat, common.Seat))

    async def Report(self, request: pb.Inventory, context: Context) -> pb.NodeView:
        """Take an inventory, answer with the node's view."""
        del context
        return await self._reports.report(from_message(request, Inventory))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.NodeView:
        """Answer when the node's view has changed, or at the deadline."""
        del context
        return await self._reports.watch(request.node, request.version, request.wait_s)

    async def Record(self, request: pb.RecordRequest, context: Context) -> pb.RecordResponse:
        """Take the events of a node."""
        del context
        events = [from_message(event, Event) for event in request.events]
        await self._transactor.change(lambda c: agents.record(c, request.node, events))
        self._reports.count_events(events)
        return pb.RecordResponse()

    async def Launch(self, request: pb.LaunchRequest, context: Context) -> pb.LaunchView:
        """Take a launcher's report, answer when its view has changed, or at the deadline."""
        del context
        view = await self._launches.ask(from_message(request, LaunchRequest))
        return to_message(view, pb.LaunchView)


def greeting(rest_url: str) -> common.HandshakeResponse:
    """Return the answer to a handshake."""
    return common.HandshakeResponse(
        software_version=holdfast.__version__,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL,
        rest_url=rest_url,
    )
