"""The catalogue as its edges have it, in one value: transactions, registrations, reports."""

from __future__ import annotations

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
        self.report, self.watch = self.reports.report, self.reports.watch
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

    async def record(self, node, events):
        await self.change(lambda c: agents.record(c, node, events))

    async def stop(self):
        await self.ticker.stop()
        await super().stop()
