"""A database lost within a registration: after the look into the bucket, before the seat."""

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import UnavailableError
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.attempts import Registration
from holdfast_services.metadata.tables import metadata as schema
from holdfast_services.metadata.usecases.agents import SeatWish, register

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB = shelf.JOB


def lose(url):
    """Empty the database, as one is that took the place of another."""
    engine = make_engine(url, connections_max=1)
    with write_transaction(engine) as connection:
        for table in schema.sorted_tables:
            if table.name != "pulse":
                connection.execute(table.delete())
    engine.dispose()


class LostAfter:
    """An archive whose catalogue is lost as soon as it has answered, ``times`` times."""

    def __init__(self, inner, url, times=1):
        self.inner, self.url, self.times = inner, url, times

    async def adopt(self, job):
        try:
            return await self.inner.adopt(job)
        finally:
            if self.times:
                self.times -= 1
                await asyncio.to_thread(lose, self.url)


@pytest.mark.parametrize("known", [False, True])
async def test_what_the_look_into_the_bucket_found_must_be_there_still(
    kit, agents, database_url, known
):
    """P5, F74: else the job looks new and starts fresh. The next try looks again."""
    store = MemoryStore()
    made = shelf.manifest(200, 2)
    shelf.put(store, made)
    async with kit.running(database_url, replace(kit.LIMITS, object_tier=True)) as service:
        if known:
            await shelf.shelve(service, made)
        service.archive = LostAfter(BucketArchive(service, store), database_url)
        with pytest.raises(UnavailableError, match=r"has just lost its checkpoints of gpt/small"):
            await service.register(kit.wish(0, "a"))
        assert await service.read(lambda c: c.run_of(JOB)) is None, "it is not even created"

        seat = await kit.launch(service, agents)
        view = await service.report(agents[0].inventory())

    assert 3 == seat.generation
    assert made.checkpoint == next(r for r in view.runs if r.run == seat.run).decision.checkpoint


async def test_an_attempt_that_was_there_must_be_there_still(kit, database_url):
    """P5: for a nonce that was known nobody has looked into the bucket."""

    def item(wish: Registration, **seen):
        return SeatWish(wish, first_run(wish.spec.job), **seen)

    async with kit.running(database_url) as service:
        items = [
            item(kit.wish(0, "a"), begun=True),
            item(kit.wish(0, "b", job="another")),
            item(kit.wish(1, "b"), begun=True),
        ]
        lost, seat, gone = await service.write(lambda c: register(c, items, service.limits))
        assert await service.read(lambda c: c.run_of(JOB)) is None

    assert [UnavailableError, UnavailableError] == [type(lost), type(gone)]
    assert lost.retryable
    assert (first_run("another"), 1) == (seat.run, seat.generation), "the rest is not harmed"
