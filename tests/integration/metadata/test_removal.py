"""A job that a user removes: from memory, catalogue and store, and never back by itself."""

from dataclasses import replace

import pytest
from tests.integration.metadata.tier import LIMITS, tier_over

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.errors import NotFoundError, PreconditionError
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.workers import Ages, bucket_items


async def ended(tier, agents, seat):
    """All ranks have ended: the name is free."""
    for rank, agent in enumerate(agents):
        agent.serve(seat, rank, live=False)
        await tier.service.report(agent.inventory())


async def remove(tier, kit):
    return await tier.service.change(lambda c: users.remove_job(c, kit.JOB))


def void(view, key):
    """Whether agents free it by this view, whatever else holds it."""
    return any(rule.covers(key) for rule in view.runs[0].superseded) and not view.runs[0].pinned


async def lived(tier, agents):
    """Step 10 is durable and pinned, 20 drains, 25 is in memory; the job has ended."""
    seat = await tier.launch(agents)
    await tier.commit(agents, seat, 10)
    key = CheckpointId(seat.run, 10, seat.generation)
    await tier.drained(key)
    await tier.durable(key)
    at = users.At("gpt/small", 10)
    await tier.service.change(lambda c: users.pin(c, at, "mine", LIMITS))
    await tier.commit(agents, seat, 20)
    await tier.commit(agents, seat, 25)
    return seat, key


async def test_a_removed_job_is_gone_from_every_tier_and_begins_anew(database_url, agents, kit):
    """F92, M1: pinned, draining, in memory; agents free, workers collect, the name starts fresh."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, key = await lived(tier, agents)
        await ended(tier, agents, seat)

        assert 1 == await remove(tier, kit)

        view = await tier.service.report(agents[0].inventory())
        assert all(void(view, replace(key, step=step)) for step in (0, 10, 20, 25))
        assert [] == await tier.service.read(lambda c: c.draining())
        items = await tier.service.read(lambda c: bucket_items(c, Ages()))
        assert [f"collect/{key.run}/10/1"] == items
        assert "job_removed" in await tier.kinds()
        with pytest.raises(NotFoundError):
            await remove(tier, kit)

        again = await tier.launch(agents, b"second")
        assert (again.run, again.generation) == (seat.run, seat.generation + 2)
        run = await tier.run()
        assert (run.decision.state, run.decision.fresh) == (DecisionState.CONFIRMED, True)
        assert not run.removed
        for agent in agents:
            agent.shards.clear()
        assert (await tier.commit(agents, again, 10)).committed[0].checkpoint.generation == 3


async def test_an_agent_that_was_away_brings_nothing_of_a_removed_job_back(
    database_url, agents, kit
):
    """F92, P5: its old segments are void, also to an attempt that asks what there is."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, key = await lived(tier, agents)
        away = kit.Agent("away")
        for step in (0, 25, 30):
            for rank, agent in enumerate(agents):
                away.hold(seat.run, step, seat.generation, rank, owner=agent.name)
        await ended(tier, agents, seat)
        await remove(tier, kit)
        for agent in agents:
            agent.shards.clear()
            await tier.service.report(agent.inventory())

        view = await tier.service.report(away.inventory())

        assert all(void(view, replace(key, step=step)) for step in (0, 25, 30))
        assert () == view.runs[0].committed
        await tier.launch(agents, b"second")
        await tier.service.report(away.inventory())
        assert (await tier.run()).decision.fresh


async def test_a_job_that_trains_or_is_read_is_not_removed(database_url, agents, kit):
    """F92: who is in the way is named."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, _ = await lived(tier, agents)
        with pytest.raises(PreconditionError, match="is training, started by holder of L"):
            await remove(tier, kit)
        await ended(tier, agents, seat)
        at = users.At(kit.JOB, 10)
        await tier.service.write(
            lambda c: users.begin_read(c, at, number="1", holder="export", ttl_s=60)
        )
        with pytest.raises(PreconditionError, match="read by export"):
            await remove(tier, kit)
        await tier.service.write(lambda c: users.end_read(c, "1"))

        assert 1 == await remove(tier, kit)


async def test_a_trainer_of_a_removed_job_that_wakes_up_is_fenced(database_url, agents, kit):
    """P2: its lease had run out; what it saves afterwards is void."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, _ = await lived(tier, agents)
        await ended(tier, agents, seat)
        await remove(tier, kit)
        for rank, agent in enumerate(agents):
            agent.shards.clear()
            agent.serve(seat, rank)
        view = await tier.commit(agents, seat, 40)

        assert view.generation == seat.generation + 1
        assert () == view.committed


async def test_a_restore_that_nobody_ended_keeps_no_slot_of_a_removed_job(
    database_url, agents, kit
):
    """4.7: an open decision names its shards, and no attempt is left to end it."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, key = await lived(tier, agents)
        await ended(tier, agents, seat)
        second = await tier.launch(agents, b"second")
        assert (await tier.run()).decision.state is DecisionState.PROPOSED
        await ended(tier, agents, second)

        await remove(tier, kit)

        view = await tier.service.report(agents[0].inventory())
        assert view.runs[0].decision.state is DecisionState.LOST
        assert void(view, key)
