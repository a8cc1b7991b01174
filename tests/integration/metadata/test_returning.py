"""An agent that was away comes back with copies of steps that are durable long since."""

from dataclasses import replace

from tests.integration.metadata.tier import tier_over
from tests.said import changed_status

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast.core.reports import StepNote
from holdfast_services.metadata.usecases import users

BEST = Retention(best=1, metric="loss")


async def made_durable(tier, agents, seat, step, loss):
    """Commit the step with notes, drain it, and free its slots everywhere."""
    note = (StepNote(step=step, json=f'{{"loss":{loss}}}'),)
    agents[0].ranks = tuple(changed_status(status, notes=note) for status in agents[0].ranks)
    await tier.commit(agents, seat, step)
    key = CheckpointId(seat.run, step, seat.generation)
    await tier.drained(key)
    await tier.durable(key)
    for agent in agents:
        agent.shards.clear()
    return key


async def twelve_durable(tier, agents, kit):
    """Twelve durable steps, the first is the best; return the seat and the one that was away."""
    seat = await tier.launch(agents)
    away = kit.Agent("away")
    for rank, agent in enumerate(agents):
        away.hold(seat.run, 10, seat.generation, rank, owner=agent.name)
    for step in range(10, 130, 10):
        await made_durable(tier, agents, seat, step, loss=0.01 if step == 10 else 0.5)
    return seat, away


async def test_an_old_copy_that_comes_back_takes_no_notes_away(database_url, agents, kit):
    """M5, M7; defect A7: retention goes on to keep the best one by its notes."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, away = await twelve_durable(tier, agents, kit)
        key = CheckpointId(seat.run, 10, seat.generation)
        before = await tier.row(key)

        await tier.service.report(away.inventory())

        assert '{"loss":0.01}' == before.notes
        assert before == replace(await tier.row(key), replicated_at_s=before.replicated_at_s)
        await tier.service.change(lambda c: users.set_policy(c, kit.JOB, BEST))
        verdicts = await tier.service.change(lambda c: users.expire(c, kit.JOB))
        assert {120, 10} == {verdict.id.step for verdict in verdicts if verdict.keep}


async def test_an_old_copy_that_comes_back_does_not_drain_again(database_url, agents, kit):
    """M5, M6; defect A7: also when a drain was just given up, so that another one is owed."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, away = await twelve_durable(tier, agents, kit)
        await tier.commit(agents, seat, 130)
        for agent in agents:
            agent.shards.clear()
            await tier.service.report(agent.inventory())
        assert (await tier.run()).persist_owed

        for _ in range(3):
            await tier.service.report(away.inventory())

        assert [] == await tier.service.read(lambda c: c.draining())
        row = await tier.row(CheckpointId(seat.run, 10, seat.generation))
        assert row.stored
        assert not row.draining


async def test_what_was_collected_does_not_go_before_the_step_that_is_owed(
    database_url, agents, kit
):
    """G10; defect A7: its row is new indeed, but older than what went last."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, away = await twelve_durable(tier, agents, kit)
        key = CheckpointId(seat.run, 10, seat.generation)
        at = users.At(kit.JOB, 10)
        await tier.service.change(lambda c: users.remove(c, at, force=False))
        await tier.collected(key)
        await tier.commit(agents, seat, 130)
        for agent in agents:
            agent.shards.clear()
            await tier.service.report(agent.inventory())

        await tier.service.report(away.inventory())

        assert (await tier.row(key)).durable_at_s is None
        assert [] == await tier.service.read(lambda c: c.draining())
        await tier.commit(agents, seat, 140)
        assert [140] == [key.step for key in await tier.service.read(lambda c: c.draining())]


async def test_a_rank_that_gives_up_a_durable_step_late_costs_nothing(database_url, agents, kit):
    """M5; defect A7, the same thought: "no row read" is not "no row"."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat, _ = await twelve_durable(tier, agents, kit)
        key = CheckpointId(seat.run, 10, seat.generation)
        gone = AbandonedStep(run=key.run, step=key.step, generation=key.generation)
        late = replace(agents[0].inventory(), abandoned=(gone,))

        await tier.service.report(late)

        assert (await tier.run()).usable(key)


async def test_a_row_written_again_keeps_its_notes_and_levels(database_url, agents, kit):
    """M5; defect A7: whoever has read too little cannot wipe anything."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        before = await tier.row(await made_durable(tier, agents, seat, 10, loss=0.5))
        bare = replace(before, notes="", durable_at_s=None, replicated_at_s=None)

        await tier.service.write(lambda c: c.put_checkpoints([bare]))

        assert before == await tier.row(before.id)
