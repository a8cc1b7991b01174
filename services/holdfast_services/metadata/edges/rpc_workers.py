"""The gRPC edge for persistence workers: decode, call, encode."""

from __future__ import annotations

from typing import Any

import grpc.aio

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.persistence_work import CheckpointWork, ShardWork, Work
from holdfast.core.shard import Shard
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import common_pb2 as common
from holdfast.v1 import persistence_pb2 as pb
from holdfast.v1.persistence_pb2_grpc import PersistenceServicer
from holdfast_services.metadata.edges.rpc_agents import greeting
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import workers
from holdfast_services.metadata.usecases.workers import Ages

Context = grpc.aio.ServicerContext[Any, Any]


class PersistenceRpc(PersistenceServicer):
    """Serves ``holdfast.v1.Persistence``."""

    def __init__(self, transactor: Transactor, rest_url: str, ages: Ages) -> None:
        self._transactor = transactor
        self._rest_url = rest_url
        self._ages = ages

    async def Handshake(
        self, request: common.HandshakeRequest, context: Context
    ) -> common.HandshakeResponse:
        """Return the versions of this service and the address of REST."""
        del request, context
        return greeting(self._rest_url)

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        """Answer what is to be done for an item now."""
        del context
        item, ages = request.item, self._ages
        return _planned(await self._transactor.read(lambda c: workers.plan(c, item, ages)))

    async def IsDurable(
        self, request: pb.IsDurableRequest, context: Context
    ) -> pb.IsDurableResponse:
        """Answer whether the catalogue relies on a checkpoint in the object store."""
        del context
        key = from_message(request.checkpoint, CheckpointId)
        durable = await self._transactor.read(lambda c: workers.is_durable(c, key))
        return pb.IsDurableResponse(durable=durable)

    async def ShardStored(
        self, request: pb.ShardStoredRequest, context: Context
    ) -> pb.ShardStoredResponse:
        """Take note of an uploaded shard."""
        del context
        shard = from_message(request.shard, Shard)
        missing = await self._transactor.write(lambda c: workers.shard_stored(c, shard))
        if missing == 0:  # only then does anybody but the worker have something to do
            self._transactor.tell()
        return pb.ShardStoredResponse(missing=missing)

    async def Durable(self, request: pb.DurableRequest, context: Context) -> pb.DurableResponse:
        """Let the row follow the manifest."""
        del context
        key, digest = from_message(request.checkpoint, CheckpointId), request.manifest_digest
        limits = self._transactor.limits
        await self._transactor.change(lambda c: workers.durable(c, key, digest, limits))
        return pb.DurableResponse()

    async def Collected(
        self, request: pb.CollectedRequest, context: Context
    ) -> pb.CollectedResponse:
        """Forget what was deleted."""
        del context
        key, freed = from_message(request.checkpoint, CheckpointId), request.freed_bytes
        await self._transactor.change(lambda c: workers.collected(c, key, freed))
        return pb.CollectedResponse()

    async def Scrubbed(self, request: pb.ScrubbedRequest, context: Context) -> pb.ScrubbedResponse:
        """Take note of what was read back."""
        del context
        key = from_message(request.checkpoint, CheckpointId)
        bad = [from_message(shard, ShardId) for shard in request.bad]
        await self._transactor.change(lambda c: workers.scrubbed(c, key, bad))
        return pb.ScrubbedResponse()


def _planned(work: Work) -> pb.PlanResponse:
    if isinstance(work, ShardWork):
        return pb.PlanResponse(shard=to_message(work, pb.ShardWork))
    if isinstance(work, CheckpointWork):
        return pb.PlanResponse(checkpoint=to_message(work, pb.CheckpointWork))
    return pb.PlanResponse(sweep=to_message(work, pb.SweepWork))
