"""The catalogue as its edges have it, in one value: transactions, registrations, reports."""

from __future__ import annotations

from holdfast.core.node_view import NodeView
from holdfast.rpc.codec import from_message
from holdfast_services.metadata.calls.launches import Launches
from holdfast_services.metadata.calls.registrations import Registrations
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.loops.tick import Ticker
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents


class Service(Transactor):
    """What a process of the metadata service is, without its sockets."""

    def __init__(self, engine, limits):
        super().__init__(engine, limits)
        self.reports = Reports(self)
        self.launches = Launches(self)
        self.ask = self.launches.ask
        self.ticker = Ticker(self)
        self.archive = None

    @property
    def archive(self):
        return self._archive

    @archive.setter
    def archive(self, archive):
        self._archive = archive
        self.register = Registrations(self, archive).register

    async def report(self, inventory):
        return from_message(await self.reports.report(inventory), NodeView)

    async def watch(self, node, version, wait_s):
        return from_message(await self.reports.watch(node, version, wait_s), NodeView)

    async def record(self, node, events):
        await self.change(lambda c: agents.record(c, node, events))

    async def stop(self):
        await self.ticker.stop()
        await super().stop()
