"""The agent's ways out: calls to metadata and to other agents, in values, with deadlines."""

from __future__ import annotations

from collections.abc import Collection

import grpc.aio

from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Inventory, Peer
from holdfast.core.needs import Head
from holdfast.core.node_view import NodeView
from holdfast.core.retry import bounded
from holdfast.core.rounds import LaunchRequest, LaunchView
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element
from holdfast.core.user_events import Event
from holdfast.errors import ManifestError, UnavailableError
from holdfast.rpc import codec
from holdfast.rpc.channel import LastingChannel, async_channel, call_async
from holdfast.v1 import agent_pb2, agent_pb2_grpc, common_pb2, metadata_pb2, metadata_pb2_grpc
from holdfast_services.agent.domain import HeldSum
from holdfast_services.transport import deadline_s
from holdfast_services.transport.located import Located

CALL_S_MAX = 5.0
REGISTER_S_MAX = 10.0
LAUNCH_WAIT_S_MAX = 60.0
PEERS_COUNT_MAX = 4096


class MetadataClient:
    """One channel to the metadata service; reconnects by itself."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = LastingChannel(address, async_channel)

    async def register(self, spec: AttemptSpec, *, node: str, generation_min: int) -> Seat:
        """Register a rank of ``node``, which knows of the job up to ``generation_min``."""
        request = metadata_pb2.RegisterRankRequest(
            spec=codec.to_message(spec, common_pb2.AttemptSpec),
            node=node,
            generation_min=generation_min,
        )
        answer = await call_async(
            self._stub.RegisterRank, request, timeout_s=REGISTER_S_MAX, job=spec.job
        )
        return codec.from_message(answer.seat, Seat)

    async def report(self, inventory: Inventory, *, timeout_s: float = CALL_S_MAX) -> NodeView:
        """Send the whole inventory; return what this node should know."""
        message = codec.to_message(inventory, metadata_pb2.Inventory)
        answer = await call_async(self._stub.Report, message, timeout_s=timeout_s)
        return codec.from_message(answer, NodeView)

    async def watch(self, node: str, version: str, *, wait_s: float) -> NodeView:
        """Return the view as soon as it differs from ``version``, or after ``wait_s``."""
        request = metadata_pb2.WatchRequest(node=node, version=version, wait_s=wait_s)
        answer = await call_async(self._stub.Watch, request, timeout_s=wait_s + CALL_S_MAX)
        return codec.from_message(answer, NodeView)

    async def launch(self, request: LaunchRequest) -> LaunchView:
        """Pass a launcher's report on; answers once its view differs, or after its ``wait_s``."""
        message = codec.to_message(request, metadata_pb2.LaunchRequest)
        wait_s = bounded(request.wait_s, LAUNCH_WAIT_S_MAX)
        answer = await call_async(self._stub.Launch, message, timeout_s=wait_s + CALL_S_MAX)
        return codec.from_message(answer, LaunchView)

    async def record(self, node: str, events: tuple[Event, ...]) -> None:
        """Send events for people; best effort."""
        messages = [codec.to_message(event, metadata_pb2.Event) for event in events]
        request = metadata_pb2.RecordRequest(node=node, events=messages)
        await call_async(self._stub.Record, request, timeout_s=CALL_S_MAX)

    @property
    def _stub(self) -> metadata_pb2_grpc.MetadataAsyncStub:
        return metadata_pb2_grpc.MetadataStub(self._channel.current)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.current.close()


class PeerClients:
    """Channels to other agents, one per address."""

    def __init__(self) -> None:
        self._channels: dict[str, LastingChannel[grpc.aio.Channel]] = {}

    async def hold(self, peer: Peer, shard: Shard, source: Peer) -> bool:
        """Ask ``peer`` to hold a copy; True once it does, verified; False: it is still coming."""
        request = agent_pb2.HoldRequest(
            shard=codec.to_message(shard, common_pb2.Shard),
            source=codec.to_message(source, common_pb2.Peer),
        )
        # Its own deadline comes first: then it says whether the copy is coming.
        timeout_s = deadline_s(shard.length_bytes) + CALL_S_MAX
        answer = await call_async(
            self._stub(peer).Hold, request, timeout_s=timeout_s, node=peer.node
        )
        return not answer.coming

    async def locate(self, peer: Peer, shard: ShardId) -> Located:
        """Ask ``peer`` in which slot incarnation it has ``shard``."""
        request = agent_pb2.LocateRequest(id=codec.to_message(shard, common_pb2.ShardId))
        answer = await call_async(
            self._stub(peer).Locate, request, timeout_s=CALL_S_MAX, node=peer.node
        )
        return codec.from_message(answer, Located)

    async def locate_element(self, peer: Peer, element: Element) -> tuple[HeldSum, int]:
        """Ask ``peer`` for an element's digests, and in which slot incarnation it has it."""
        request = agent_pb2.LocateElementRequest(key=element.key)
        stub = self._stub(peer)
        answer = await call_async(stub.LocateElement, request, timeout_s=CALL_S_MAX, node=peer.node)
        held = HeldSum(
            element=element,
            root_digest=answer.root_digest,
            digests=answer.part_digests,
            member_digests=tuple(answer.member_digests),
        )
        if len(held.member_digests) != len(element.stripe.members):
            raise ManifestError(f"{element.key} has digests of other members", node=peer.node)
        return held, answer.slot_incarnation

    async def suspect_element(
        self, peer: Peer, key: str, incarnation: int, length_bytes: int
    ) -> bool:
        """Tell ``peer`` that its element did not match; True when it found it bad."""
        request = agent_pb2.SuspectElementRequest(key=key, slot_incarnation=incarnation)
        stub = self._stub(peer)
        answer = await call_async(
            stub.SuspectElement, request, timeout_s=deadline_s(length_bytes), node=peer.node
        )
        return bool(answer.dropped)

    async def read_heads(
        self, peer: Peer, checkpoint: CheckpointId, ranks: Collection[int]
    ) -> tuple[Head, ...]:
        """Ask ``peer`` for the heads of segments of a checkpoint, of those that it holds."""
        request = agent_pb2.HeadsRequest(
            checkpoint=codec.to_message(checkpoint, common_pb2.CheckpointId), ranks=sorted(ranks)
        )
        stub = self._stub(peer)
        answer = await call_async(stub.ReadHeads, request, timeout_s=CALL_S_MAX, node=peer.node)
        return tuple(codec.from_message(head, Head) for head in answer.heads)

    async def suspect(
        self, peer: Peer, shard: ShardId, incarnation: int, length_bytes: int
    ) -> bool:
        """Tell ``peer`` that its bytes did not match; True when it found its copy bad."""
        request = agent_pb2.SuspectRequest(
            id=codec.to_message(shard, common_pb2.ShardId), slot_incarnation=incarnation
        )
        answer = await call_async(
            self._stub(peer).Suspect,
            request,
            timeout_s=deadline_s(length_bytes),
            node=peer.node,
        )
        return bool(answer.quarantined)

    def _stub(self, peer: Peer) -> agent_pb2_grpc.ReplicationAsyncStub:
        if peer.rpc_address not in self._channels:
            if len(self._channels) >= PEERS_COUNT_MAX:
                raise UnavailableError(f"more than {PEERS_COUNT_MAX} peers", node=peer.node)
            self._channels[peer.rpc_address] = LastingChannel(peer.rpc_address, async_channel)
        return agent_pb2_grpc.ReplicationStub(self._channels[peer.rpc_address].current)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.current.close()
        self._channels.clear()
