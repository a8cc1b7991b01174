"""Puts an agent together: arena, machine, transport, servers, reporter; starts and stops them."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.byte_sizes import format_bytes
from holdfast.core.inventory import Peer
from holdfast.core.user_events import Event
from holdfast.errors import AccessError
from holdfast.rpc.channel import unix_target
from holdfast.v1 import agent_pb2_grpc
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import MetadataClient, PeerClients
from holdfast_services.agent.data_plane import data_plane
from holdfast_services.agent.fetcher import Fetcher
from holdfast_services.agent.launchers import Launchers
from holdfast_services.agent.numa import memory_nodes
from holdfast_services.agent.performer import Performer
from holdfast_services.agent.recovery import adopt
from holdfast_services.agent.reporter import Reporter
from holdfast_services.agent.rpc import AgentRpc, ReplicationRpc
from holdfast_services.agent.segment_heads import HeadFinder
from holdfast_services.agent.service import AgentService
from holdfast_services.agent.settings import Settings, default_budget_bytes
from holdfast_services.agent.shell import Shell
from holdfast_services.agent.store_source import ObjectTier
from holdfast_services.kit.pace import Pace
from holdfast_services.kit.server import bind, make_server
from holdfast_services.kit.traces import open_traces
from holdfast_services.transport import ServedSegments
from holdfast_services.transport.paced import Paced

if TYPE_CHECKING:
    from holdfast_services.kit.metrics_server import MetricsServer
    from holdfast_services.kit.otlp import Traces

GRACE_S = 1.0

log = logging.getLogger(__name__)


class Agent:
    """One node's agent; ``start``, ``run``, ``close``, in this order, on one loop.

    ``metrics_url`` is where its figures are; empty: nobody asked for them.

    Args:
        settings: What it is to be.
    """

    me: Peer
    metrics_url = ""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._target = unix_target(settings.agent_socket)
        budget = settings.budget_bytes or default_budget_bytes(settings.arena)
        self._arena = Arena(settings.arena, budget)
        self._transport = data_plane(settings, budget)
        self._paced = Paced(self._transport, Pace(settings.replicate_bytes_per_s))
        self._served = ServedSegments(revoke=self._transport.revoke)
        self._metadata = MetadataClient(settings.metadata_address)
        self._peers = PeerClients()
        self._local = make_server()
        self._remote = make_server()
        self._metrics: MetricsServer | None = None
        self._traces: Traces | None = None

    async def start(self) -> None:
        """Adopt what is in the arena, then listen.

        Raises:
            UnavailableError: an address is taken.
            AccessError: the socket's folder belongs to somebody else.
        """
        endpoints = self._transport.serve(self._served)
        host = self._settings.listen_host
        port = bind(self._remote, f"{host}:{self._settings.rpc_port}")
        self.me = Peer(
            node=self._settings.node,
            rpc_address=f"{host}:{port}",
            endpoints=endpoints,
            domain=self._settings.domain,
        )
        state = await asyncio.to_thread(adopt, self._arena, self._served, self.me)
        state.copies_bytes_per_s = self._settings.replicate_bytes_per_s
        state.nodes_of_memory = len(memory_nodes())
        tier = ObjectTier(self._settings.store)
        fetcher = Fetcher(
            node=self.me.node,
            arena=self._arena,
            transport=self._paced,
            peers=self._peers,
            tier=tier,
        )
        self._performer = Performer(
            me=self.me,
            arena=self._arena,
            served=self._served,
            fetcher=fetcher,
            peers=self._peers,
        )
        self._shell = Shell(state=state, arena=self._arena, performer=self._performer)
        self._reporter = Reporter(self.me.node, self._metadata, self._shell)
        self._shell.on_inventory = self._reporter.poke
        self._shell.on_event = self._reporter.tell
        self._tell_of_transports()
        service = AgentService(
            self._shell,
            self._arena,
            self._metadata,
            self._transport.states,
            lambda: fetcher.unchanged_bytes,
            replicate_bytes_per_s=self._settings.replicate_bytes_per_s,
        )
        heads = HeadFinder(
            shell=self._shell,
            arena=self._arena,
            peers=self._peers,
            tier=tier,
            parity=fetcher.parity,
        )
        await self._serve_metrics()
        self._trace()
        await self._listen(service, heads, host)
        log.info(
            "node %s: %d slots adopted, budget %s, agent %s, rpc %s, data %s",
            self.me.node,
            len(state.slots),
            format_bytes(state.budget_bytes),
            self._settings.agent_socket,
            self.me.rpc_address,
            ", ".join(map(str, endpoints)),
        )

    async def _listen(self, service: AgentService, heads: HeadFinder, host: str) -> None:
        """Serve trainers and launchers on the socket, other agents on TCP."""
        self._launchers = Launchers(self.me.node, host, self._arena, self._metadata)
        local = AgentRpc(service, heads, self._launchers)
        remote = ReplicationRpc(service, heads)
        agent_pb2_grpc.add_AgentServicer_to_server(local, self._local)
        agent_pb2_grpc.add_ReplicationServicer_to_server(remote, self._remote)
        _private_folder(self._settings.agent_socket)
        bind(self._local, self._target)
        await self._remote.start()
        await self._local.start()

    async def _serve_metrics(self) -> None:
        """Serve ``/metrics`` if it is asked for, and count durations from here on."""
        if not self._settings.metrics_listen:
            return
        # Here: who serves none needs neither the memory nor the time of these libraries.
        from holdfast_services.agent.metrics import AgentFigures  # noqa: PLC0415
        from holdfast_services.kit.metrics_server import MetricsServer  # noqa: PLC0415

        figures = AgentFigures(
            shell=self._shell,
            performer=self._performer,
            reporter=self._reporter,
            transports=self._transport,
        )
        names = self._settings.rest_names
        self._metrics = MetricsServer(self._settings.metrics_listen, "Holdfast agent", names)
        self._performer.on_ended.append(figures.durations.ended)
        await self._metrics.begin(figures.families)
        self.metrics_url = self._metrics.url
        log.info("metrics on %s/metrics", self.metrics_url)

    def _trace(self) -> None:
        """Send a span for each slot that is sealed and each copy that comes, if asked for."""
        self._traces = open_traces(self._settings, "agent", self.me.node)
        if self._traces:
            from holdfast_services.agent.traces import tell  # noqa: PLC0415 - as in open_traces

            self._performer.on_ended.append(partial(tell, self._traces))

    def _tell_of_transports(self) -> None:
        """Tell people which transport cannot be used, now and when one is left for another."""
        loop = asyncio.get_running_loop()
        warn = partial(Event, severity="warning", context={"node": self.me.node})

        def left(why: str) -> None:
            event = warn(kind="transport_left", message=why)
            with suppress(RuntimeError):  # the loop is closed: nobody hears any more
                loop.call_soon_threadsafe(self._reporter.tell, event)

        self._transport.on_fallback = left
        for state in self._transport.states():
            if state.problem:
                message = f"{state.kind} is not used: {state.problem}"
                self._reporter.tell(warn(kind="transport_unused", message=message))

    async def run(self, stop: asyncio.Event) -> None:
        """Scan and report until ``stop`` is set; then say goodbye.

        Raises:
            Exception: a loop failed; that is a bug, and the agent ends.
        """
        loops = [
            asyncio.create_task(self._shell.scan()),
            asyncio.create_task(self._reporter.run()),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({*loops, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*loops, stopping):
                task.cancel()
            results = await asyncio.gather(*loops, stopping, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, asyncio.CancelledError):
                raise result
        await self._reporter.leave()

    async def close(self) -> None:
        """Stop serving, interrupt transfers, keep the arena's files."""
        if self._metrics:
            await self._metrics.end()
        if self._traces:
            await asyncio.to_thread(self._traces.close)
        self._launchers.close()
        await self._local.stop(GRACE_S)
        await self._remote.stop(GRACE_S)
        await asyncio.to_thread(self._transport.close)
        await self._performer.stop()
        await self._peers.close()
        await self._metadata.close()
        self._arena.close()


def _private_folder(socket: Path) -> None:
    """Make the socket's folder and close it to others; the folder must be ours."""
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if socket.parent.stat().st_uid != os.getuid():
        raise AccessError(f"folder {socket.parent} belongs to another user")
    socket.parent.chmod(0o700)
    socket.unlink(missing_ok=True)
