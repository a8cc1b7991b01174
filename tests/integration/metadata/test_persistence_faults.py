"""Drains while a queue or Postgres goes away: nothing is lost, nothing is torn."""

import pytest
from sqlalchemy import event
from tests.integration.metadata.tier import LIMITS, tier_over, until

from holdfast.core.ids import CheckpointId
from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.kit.queue.memory import MemoryQueue
from holdfast_services.metadata.loops.offers import Reconciler
from holdfast_services.metadata.usecases.workers import Ages

OFFERS = "holdfast_services.metadata.loops.offers"


async def test_an_emptied_queue_is_full_again(database_url, agents, kit, monkeypatch):
    """Losing Redis loses nothing: what is due follows from the catalogue."""
    monkeypatch.setattr(f"{OFFERS}.RECONCILE_S", 0.3)
    async with tier_over(database_url, kit) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        await tier.do_next()
        await tier.claim()
        tier.queue.forget()
        items = [await tier.do_next() for _ in range(2)]

        assert f"manifest/{seat.run}/10/1" == items[1]


class BrokenQueue(MemoryQueue):
    """Does not answer until it is mended."""

    broken = True

    def offer(self, items):
        if self.broken:
            raise UnavailableError("connection refused")
        return super().offer(items)


async def test_a_queue_that_is_down_is_said_once_and_harms_nothing_else(
    database_url, agents, kit, monkeypatch
):
    """P4: training goes on; when it is back, what is due is there."""
    monkeypatch.setattr(f"{OFFERS}.RECONCILE_S", 0.1)
    monkeypatch.setattr(f"{OFFERS}.GAP_S", 0.02)
    async with tier_over(database_url, kit, offers=False) as tier:
        tier.queue = queue = BrokenQueue(lease_s=30)
        reconciler = Reconciler(tier.service, queue, Ages())
        reconciler.start()
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        await until(lambda: said(tier, "queue_down"))
        for _ in range(5):
            await tier.service.changed(0.1)
        await tier.commit(agents, seat, 11)
        assert 1 == (await tier.kinds()).count("queue_down")

        queue.broken = False
        assert [await tier.do_next() for _ in range(3)]
        await until(lambda: said(tier, "queue_up"))
        await reconciler.stop()


async def said(tier, kind):
    return kind in await tier.kinds()


async def test_two_services_may_offer_to_one_queue(database_url, agents, kit):
    """Any number of metadata processes: an item is there once."""
    async with tier_over(database_url, kit) as tier, kit.running(database_url, LIMITS) as other:
        reconciler = Reconciler(other, tier.queue, Ages())
        reconciler.start()
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        done = [await tier.do_next() for _ in range(3)]
        await reconciler.stop()

        assert 3 == len(set(done))


@pytest.mark.parametrize(
    "where", ["UPDATE drains", "INSERT INTO objects", "DELETE FROM drains", "commit"]
)
async def test_postgres_restarted_mid_commit_leaves_all_or_nothing(
    own_postgres, own_url, agents, kit, where
):
    """P1: the server dies in the middle of ShardStored or Durable; a repeat ends it."""
    async with tier_over(own_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        first, second = await tier.service.read(lambda c: c.drained_shards(key))
        await tier.stored(first)
        engine = tier.service._engine
        struck = []

        def strike(*arguments):
            statement = str(arguments[2]) if len(arguments) > 2 else "commit"
            if not struck and statement.startswith(where):
                struck.append(statement)
                own_postgres.stop()

        name = "commit" if where == "commit" else "before_cursor_execute"
        steps = [lambda: tier.stored(second), lambda: tier.durable(key)]
        if where != "UPDATE drains":
            await steps.pop(0)()
        event.listen(engine, name, strike)
        with pytest.raises(CheckpointError):
            await steps[0]()
        event.remove(engine, name, strike)
        assert struck
        own_postgres.start()

        row, known = await tier.row(key), await tier.service.read(lambda c: c.stored(key))
        assert row.stored == (known is not None) == (not row.draining), "torn"
        for step in steps:
            await step()
        assert (await tier.row(key)).stored
        assert 1 == (await tier.kinds()).count("checkpoint_durable")


async def test_postgres_restarted_between_shard_and_manifest_loses_nothing(
    own_postgres, own_url, agents, kit
):
    async with tier_over(own_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        own_postgres.stop()
        with pytest.raises(UnavailableError):
            await tier.durable(key)
        own_postgres.start()
        await tier.durable(key)

        assert (await tier.row(key)).stored
