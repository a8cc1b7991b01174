"""How long an agent rests between two reports."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.said import tcp

from holdfast.core.inventory import Inventory, Peer
from holdfast.core.user_events import EVENTS_PER_CALL_MAX, Event
from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast_services.agent import reporter
from holdfast_services.agent.reporter import (
    COALESCE_S,
    EVENTS_COUNT_MAX,
    REPORT_WAITS,
    Reporter,
)
from holdfast_services.metadata.usecases.agents import LISTEN_S

FAILURES_COUNT = 12


class Away:
    """Metadata that never answers; says so to ``rests`` between two reports."""

    address = "nowhere"

    def __init__(self, rests):
        self.rests = rests

    async def report(self, inventory):
        self.rests.append(0.0)
        if len(self.rests) > FAILURES_COUNT:
            raise asyncio.CancelledError
        raise UnavailableError("no answer")


class Agent:
    view_version = ""

    def inventory(self, **numbers):
        peer = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
        return Inventory(
            node=peer, incarnation=numbers["incarnation"], sequence=numbers["sequence"]
        )

    def metadata_lost(self, reason):
        pass


def test_an_agent_rests_less_than_a_new_catalogue_listens(monkeypatch):
    """P6: once after each report that failed, not twice; else its checkpoints are told too late."""
    rests = []

    async def rest(wait_s):
        if rests:
            rests[-1] += wait_s

    async def wait(event, wait_s):
        await rest(wait_s)

    async def main():
        monkeypatch.setattr(reporter, "_wait", wait)
        monkeypatch.setattr(reporter.asyncio, "sleep", rest)
        await Reporter("a", Away(rests), Agent())._report_loop()

    with suppress(asyncio.CancelledError):
        asyncio.run(main())

    assert [REPORT_WAITS.wait_s(n) + COALESCE_S for n in range(1, FAILURES_COUNT + 1)] == rests[:-1]
    assert max(rests) < REPORT_WAITS.wait_s_max + 0.5 < LISTEN_S


class Strict(Away):
    """Takes news as metadata does: no more than it may; ``failures`` calls get no answer."""

    def __init__(self, failures):
        super().__init__([])
        self.failures = failures
        self.recorded = []

    async def record(self, node, events):
        if self.failures:
            self.failures -= 1
            raise UnavailableError("no answer")
        if len(events) > EVENTS_PER_CALL_MAX:
            raise InvalidRequestError("too many")
        self.recorded += [int(event.message) for event in events]
        if self.recorded[-1] == EVENTS_COUNT_MAX + 2:
            raise asyncio.CancelledError


def test_news_that_gathered_in_an_outage_is_told_in_calls_that_metadata_takes(monkeypatch):
    """More than one call may bring was refused whole, again and again, and all that came after."""

    rests = []

    async def rest(wait_s):
        rests.append(wait_s)
        if len(rests) > 1:
            raise asyncio.CancelledError
        news.tell(Event(kind="x", severity="info", message=str(EVENTS_COUNT_MAX + 2)))

    async def main():
        monkeypatch.setattr(reporter.asyncio, "sleep", rest)
        for number in range(EVENTS_COUNT_MAX + 2):
            news.tell(Event(kind="x", severity="info", message=str(number)))
        news._reached.set()
        await news._record_loop()

    metadata = Strict(failures=1)
    news = Reporter("a", metadata, Agent())
    with suppress(asyncio.CancelledError):
        asyncio.run(main())

    assert [*range(3, EVENTS_COUNT_MAX + 3)] == [*metadata.recorded]
