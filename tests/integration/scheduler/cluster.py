"""A cluster in one process: the real metadata service and schedulers over real databases; nodes,
with their agents, executors and launchers, are values that say what such would.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from tests.integration.metadata.service import Service
from tests.said import tcp

from holdfast.core.executions import (
    ExecutorReport,
    ExecutorRequest,
    LaunchState,
    Outcome,
)
from holdfast.core.inventory import Inventory, Peer
from holdfast.core.job_spec import JobSpec
from holdfast.core.rounds import LauncherReport, LaunchRequest, LaunchView, Terms
from holdfast.errors import CheckpointError
from holdfast_services.kit.db import make_engine
from holdfast_services.kit.rest import RestServer
from holdfast_services.kit.transactions import Transactions
from holdfast_services.metadata import migrations as metadata_migrations
from holdfast_services.metadata.calls.health import StoreHealth
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app as metadata_app
from holdfast_services.scheduler import migrations
from holdfast_services.scheduler.calls.executors import Executors
from holdfast_services.scheduler.calls.metadata import Metadata
from holdfast_services.scheduler.domain.job import State
from holdfast_services.scheduler.loops.leader import Leader
from holdfast_services.scheduler.planning import Planner
from holdfast_services.scheduler.storage import JobCache, Statements
from holdfast_services.scheduler.usecases import jobs

UNTIL_S_MAX = 60.0
LIMITS = Limits(node_lease_s=60.0, decide_wait_s=60.0)


class Scheduler:
    """What a process of the scheduler is, without its socket."""

    def __init__(self, url, metadata_url, name, policy="fifo"):
        self.engine = make_engine(url, connections_max=4)
        migrations.upgrade(self.engine)
        cache = JobCache()
        self.transactions = Transactions(
            self.engine, lambda c: Statements(c, cache), threads=4, name=name
        )
        self.executors = Executors(self.transactions)
        self.metadata = Metadata("", lambda _: metadata_url)
        self.leader = Leader(
            self.transactions,
            self.metadata,
            Planner(policy, {}),
            me=name,
            told=self.executors.wake,
        )

    async def submit(self, name, low=1, high=None, **what):
        spec = JobSpec(name=name, command=("x.py",), gpus_min=low, gpus_max=high or low, **what)
        made = await self.transactions.write(
            lambda s: jobs.submit(s, spec, f"id-{name}", {}, dry_run=False)
        )
        self.transactions.wake()
        return made.job

    async def cancel(self, name):
        await self.transactions.write(lambda s: jobs.cancel(s, name, "by a test"))
        self.transactions.wake()

    async def job(self, name):
        return (await self.transactions.read(lambda s: s.job(name))).job

    async def lease(self):
        return await self.transactions.read(lambda s: s.lease())

    async def kill(self):
        """End it as by SIGKILL: nothing is said, nothing is given up."""
        for task in self.leader._tasks:
            task.cancel()
        if self.leader._tasks:
            await asyncio.wait(self.leader._tasks)
        await self.transactions.stop()
        self.engine.dispose()

    async def stop(self):
        await self.leader.stop()
        await self.transactions.stop()
        self.engine.dispose()


class Node:
    """A node: what its agent, executor and launchers say, and what they are told."""

    def __init__(self, name, gpus, metadata):
        self.name = name
        self.metadata = metadata
        self.report = ExecutorReport(executor=f"{name:0>32}"[:32], sequence=1, gpus=gpus)
        self.states = {}
        self.launchers = {}
        self.views = {}
        self.version = ""
        self.ports = 7000
        self.fails = {}
        self.inventories = 0

    async def live(self, scheduler):
        """Do what a node does once: report, carry out orders, follow views."""
        self.inventories += 1
        await self.metadata.report(self._inventory())
        self.report = replace(
            self.report,
            sequence=self.report.sequence + 1,
            launches=tuple(self.states.values()),
        )
        request = ExecutorRequest(report=self.report, version=self.version)
        orders = await scheduler.executors.ask(self.name, request)
        ordered = {(order.job, order.start): order for order in orders.orders}
        for key, order in ordered.items():
            if key not in self.states and not order.leaving:
                self._start(key, order)
        for key, state in list(self.states.items()):
            if key not in ordered:
                if state.outcome is Outcome.RUNNING:
                    await self._leave(key, Outcome.STOPPED, 143)
                else:
                    del self.states[key]
        self.report = replace(self.report, applied=orders.number)
        for key in [k for k, s in self.states.items() if s.outcome is Outcome.RUNNING]:
            await self._follow(key)

    def _inventory(self):
        peer = Peer(node=self.name, rpc_address=f"{self.name}:1", endpoints=tcp(f"{self.name}:2"))
        return Inventory(
            node=peer, incarnation=1, sequence=self.inventories, budget_bytes=1, used_bytes=0
        )

    def _start(self, key, order):
        state = LaunchState(job=key[0], start=key[1])
        if why := self.fails.get(key[0]):
            state = replace(state, outcome=why, code=1, reason=f"{why.value} here")
        else:
            self.launchers[key] = LauncherReport(
                launcher=f"{abs(hash((self.name, key))):032x}"[:32],
                sequence=0,
                job=key[0],
                ranks=order.gpus,
                terms=Terms(nodes_min=1, nodes_max=order.nodes_max, allocated=True),
                port=self._port(),
            )
        self.states[key] = state

    def _port(self):
        self.ports += 1
        return self.ports

    async def say(self, key, **what):
        """Have a launcher tell something; return what it is told."""
        last = self.launchers[key]
        self.launchers[key] = replace(last, sequence=last.sequence + 1, **what)
        request = LaunchRequest(
            report=self.launchers[key], node=self.name, address=f"{self.name}.example"
        )
        self.views[key] = await self.metadata.ask(request)
        return self.views[key]

    async def _follow(self, key):
        view: LaunchView = await self.say(key)
        if view.place and view.place.nonce != self.launchers[key].round:
            await self.say(key, round=view.place.nonce, port=self._port())
        elif view.ending is not None:
            outcome = Outcome.RELEASED if view.ending.released else Outcome.ENDED
            await self._leave(key, outcome, view.ending.code)
        elif view.stop:
            await self._leave(key, Outcome.RELEASED, 143)

    async def _leave(self, key, outcome, code):
        if key in self.launchers:
            await self.say(key, left=True)
            del self.launchers[key]
        self.states[key] = replace(self.states[key], outcome=outcome, code=code)

    async def end(self, job, outcome=Outcome.ENDED, code=0, reason=""):
        """Have the launcher of a job end."""
        (key,) = [key for key in self.launchers if key[0] == job]
        await self._leave(key, outcome, code)
        self.states[key] = replace(self.states[key], reason=reason)


class Cluster:
    """Metadata, nodes, and the schedulers that a test starts."""

    def __init__(self, url, folder, **gpus):
        self.url = url
        self._gpus = gpus
        self._folder = folder
        self.schedulers = []

    async def __aenter__(self):
        self._engine = make_engine(f"sqlite:///{self._folder / 'metadata.db'}", connections_max=4)
        await asyncio.to_thread(metadata_migrations.upgrade, self._engine)
        self.metadata = Service(self._engine, LIMITS)
        self._rest = RestServer("127.0.0.1:0")
        await self.serve()
        self.nodes = {n: Node(n, count, self.metadata) for n, count in self._gpus.items()}
        return self

    async def serve(self):
        """Have metadata's REST answer."""
        nothing = ObjectTier(health=StoreHealth(None), archive=None, queue=None)
        service = self.metadata
        app = metadata_app(service, service.reports, service.launches, nothing, asyncio.Event())
        await self._rest.begin(app)

    async def silence(self):
        """Have metadata's REST not answer any more."""
        self._rest.close()
        await self._rest.ended()

    async def __aexit__(self, *_):
        for scheduler in self.schedulers:
            with contextlib.suppress(CheckpointError):
                await scheduler.stop()
        await self.silence()
        await self.metadata.stop()
        self._engine.dispose()

    def scheduler(self, name="s1", *, starts=True, **options):
        made = Scheduler(self.url, self._rest.url, name, **options)
        self.schedulers.append(made)
        if starts:
            made.leader.start()
        return made

    async def until(self, met, what, scheduler=None):
        """Let nodes live until ``met``; it is awaited."""
        ends_s = time.monotonic() + UNTIL_S_MAX
        while not await met():
            assert time.monotonic() < ends_s, what
            for node in self.nodes.values():
                with contextlib.suppress(CheckpointError):
                    await node.live(scheduler or self.schedulers[-1])
            await asyncio.sleep(0.05)

    async def until_state(self, name, state, scheduler=None):
        """Let nodes live until a job is in a state; return it."""
        scheduler = scheduler or self.schedulers[-1]
        seen = []

        async def met():
            seen.append(await scheduler.job(name))
            return seen[-1].state is state

        try:
            await self.until(met, f"{name} is {state.value}", scheduler)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen[-1]}") from None
        return seen[-1]

    async def train(self, scheduler, name="gpt", low=1, high=None, **what):
        """Submit a job and return it once it trains."""
        await scheduler.submit(name, low, high, **what)
        return await self.until_state(name, State.RUNNING, scheduler)
