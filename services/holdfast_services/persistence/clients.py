"""The worker's ways out: calls to metadata and to agents, in values, with deadlines."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.persistence_work import CheckpointWork, ShardWork, SweepWork, Work
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast.errors import InvalidRequestError
from holdfast.rpc import codec
from holdfast.rpc.channel import LastingChannel, call, sync_channel
from holdfast.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    common_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    persistence_pb2_grpc,
)
from holdfast.v1 import persistence_pb2 as pb
from holdfast_services.transport import deadline_s
from holdfast_services.transport.located import Located

CALL_S_MAX = 10.0


class MetadataClient:
    """One channel to the metadata service, for all threads; reconnects by itself.

    Every method raises a CheckpointError: what metadata answered, or what its silence means.
    """

    def __init__(self, address: str, worker: str) -> None:
        self._worker = worker
        self._channel = LastingChannel(address, sync_channel)

    @property
    def _stub(self) -> persistence_pb2_grpc.PersistenceStub:
        return persistence_pb2_grpc.PersistenceStub(self._channel.current)

    def plan(self, item: str) -> Work:
        """Return what is to be done for an item now; NotFoundError when nothing is."""
        request = pb.PlanRequest(item=item, worker=self._worker)
        answer = call(self._stub.Plan, request, timeout_s=CALL_S_MAX, item=item)
        return _work(answer)

    def is_durable(self, checkpoint: CheckpointId) -> bool:
        """Tell whether the catalogue relies on the checkpoint in the object store."""
        message = codec.to_message(checkpoint, common_pb2.CheckpointId)
        request = pb.IsDurableRequest(worker=self._worker, checkpoint=message)
        return bool(call(self._stub.IsDurable, request, timeout_s=CALL_S_MAX).durable)

    def shard_stored(self, shard: Shard) -> int:
        """Report a shard that is in the store and verified; return how many are still to come."""
        message = codec.to_message(shard, common_pb2.Shard)
        request = pb.ShardStoredRequest(worker=self._worker, shard=message)
        return int(call(self._stub.ShardStored, request, timeout_s=CALL_S_MAX).missing)

    def durable(self, checkpoint: CheckpointId, manifest_digest: bytes) -> None:
        """Report that the manifest is in the store.

        Raises:
            StaleGenerationError: the checkpoint was superseded meanwhile; its folder is harmless.
        """
        request = pb.DurableRequest(
            worker=self._worker,
            checkpoint=codec.to_message(checkpoint, common_pb2.CheckpointId),
            manifest_digest=manifest_digest,
        )
        call(self._stub.Durable, request, timeout_s=CALL_S_MAX)

    def collected(self, checkpoint: CheckpointId, freed_bytes: int) -> None:
        """Report that nothing of an expired checkpoint is left."""
        request = pb.CollectedRequest(
            worker=self._worker,
            checkpoint=codec.to_message(checkpoint, common_pb2.CheckpointId),
            freed_bytes=freed_bytes,
        )
        call(self._stub.Collected, request, timeout_s=CALL_S_MAX)

    def scrubbed(self, checkpoint: CheckpointId, bad: Sequence[ShardId]) -> None:
        """Report that every shard was read back, and which are not what they should be."""
        request = pb.ScrubbedRequest(
            worker=self._worker,
            checkpoint=codec.to_message(checkpoint, common_pb2.CheckpointId),
            bad=[codec.to_message(shard, common_pb2.ShardId) for shard in bad],
        )
        call(self._stub.Scrubbed, request, timeout_s=CALL_S_MAX)

    def record(self, event: Event) -> None:
        """Send an event for people."""
        message = codec.to_message(event, metadata_pb2.Event)
        request = metadata_pb2.RecordRequest(node=self._worker, events=[message])
        stub = metadata_pb2_grpc.MetadataStub(self._channel.current)
        call(stub.Record, request, timeout_s=CALL_S_MAX)

    def close(self) -> None:
        """Close the channel."""
        self._channel.current.close()


def _work(answer: pb.PlanResponse) -> Work:
    kind = answer.WhichOneof("work")
    if kind == "shard":
        return codec.from_message(answer.shard, ShardWork)
    if kind == "checkpoint":
        return codec.from_message(answer.checkpoint, CheckpointWork)
    if kind == "sweep":
        return codec.from_message(answer.sweep, SweepWork)
    raise InvalidRequestError("metadata asks for work that this worker does not know: upgrade it")


def locate(peer: Peer, shard: Shard) -> Located:
    """Return where ``peer`` has ``shard``; its part digests give the root digest.

    Raises:
        NotFoundError: it has none.
        DigestMismatchError: it has another segment under this id.
        UnavailableError: it does not answer.
    """
    request = agent_pb2.LocateRequest(id=codec.to_message(shard.id, common_pb2.ShardId))
    with sync_channel(peer.rpc_address) as channel:
        stub = agent_pb2_grpc.ReplicationStub(channel)
        answer = call(stub.Locate, request, timeout_s=CALL_S_MAX, node=peer.node)
    located = codec.from_message(answer, Located)
    located.check(shard)
    return located


def suspect(peer: Peer, shard: Shard, incarnation: int) -> bool:
    """Tell ``peer`` that its bytes did not match; True when it found its copy bad."""
    request = agent_pb2.SuspectRequest(
        id=codec.to_message(shard.id, common_pb2.ShardId), slot_incarnation=incarnation
    )
    with sync_channel(peer.rpc_address) as channel:
        stub = agent_pb2_grpc.ReplicationStub(channel)
        timeout_s = deadline_s(shard.length_bytes)
        answer = call(stub.Suspect, request, timeout_s=timeout_s, node=peer.node)
    return bool(answer.quarantined)
