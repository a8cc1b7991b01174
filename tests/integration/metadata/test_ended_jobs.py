"""What jobs cost that have ended and left checkpoints in memory: nothing, while nothing moves."""

from dataclasses import replace

import pytest
from sqlalchemy import event
from tests.said import rank_status

from holdfast.core.abandoned_step import AbandonedStep
from holdfast_services.metadata import transactor
from holdfast_services.metadata.usecases.agents import report


def statements(service):
    """Return the list to which each statement is added from now on."""
    found = []
    event.listen(service._engine, "before_cursor_execute", lambda *said: found.append(said[2]))
    return found


async def leave_jobs(service, kit, agent, numbers):
    """Have jobs of these numbers save a step each and end long ago; return their runs."""
    runs = []
    for number in numbers:
        wish = kit.wish(0, agent.name, bytes([number]), world=1, job=f"job{number}", replicas=0)
        seat = await service.register(wish)
        status = rank_status(job=f"job{number}", run=seat.run, generation=seat.generation, rank=0)
        agent.ranks = (status,)
        await service.report(agent.inventory())
        agent.hold(seat.run, 5, seat.generation, 0, world=1)
        held = agent.shards[-1]
        shard = replace(held.shard, job=f"job{number}")
        agent.shards[-1] = replace(held, shard=shard)
        runs.append(seat.run)
    agent.ranks = ()
    await service.report(agent.inventory())
    await service.change(lambda c: c.forget_leases())
    return runs


async def reads_count(service, agent):
    """Return how many statements a look at the node's view takes while nothing happens."""
    version = (await service.watch(agent.name, "", 0)).version
    found = statements(service)
    assert version == (await service.watch(agent.name, version, 0)).version
    return len(found)


async def test_ended_jobs_are_not_read_again_while_nothing_changes(database_url, agents, kit):
    counts = []
    async with kit.running(database_url) as service:
        for numbers in (range(1), range(1, 9)):
            await leave_jobs(service, kit, agents[0], numbers)
            counts.append(await reads_count(service, agents[0]))
        view = await service.watch(agents[0].name, "", 0)
    assert counts[0] == counts[1]
    assert 9 == len(view.runs)


async def test_news_of_one_job_reads_no_other_that_has_ended(database_url, agents, kit):
    """Else each step of whoever trains costs what all have left who trained there before."""
    counts, agent = [], agents[0]
    async with kit.running(database_url) as service:
        seat = await service.register(kit.wish(0, agent.name, world=1, replicas=0))
        for step, numbers in ((1, range(1)), (2, range(1, 9))):
            await leave_jobs(service, kit, agent, numbers)
            await service.watch(agent.name, "", 0)
            found = statements(service)
            agent.hold(seat.run, step, seat.generation, 0, world=1)
            await service.report(agent.inventory())
            counts.append(sum("FROM runs" in said for said in found))
        view = await service.watch(agent.name, "", 0)
    assert 0 < counts[0] == counts[1]
    assert 10 == len(view.runs)


async def test_what_is_changed_of_an_ended_job_is_seen_at_once(database_url, agents, kit):
    async with kit.running(database_url) as service:
        runs = await leave_jobs(service, kit, agents[0], range(2))
        await service.watch("a", "", 0)
        agents[0].shards.pop(0)
        await service.report(agents[0].inventory())
        seat = await service.register(kit.wish(0, "a", b"again", world=1, job="job1", replicas=0))
        view = await service.watch("a", "", 0)

    [shown] = view.runs
    assert (runs[1], seat.generation) == (shown.run, shown.generation)


async def test_what_another_process_has_changed_is_seen_after_a_while(
    database_url, agents, kit, monkeypatch
):
    async with kit.running(database_url) as one, kit.running(database_url) as other:
        [run] = await leave_jobs(one, kit, agents[0], range(1))
        await one.watch("a", "", 0)
        await other.change(lambda c: _supersede(c, run))
        monkeypatch.setattr(transactor, "ENDED_S_MAX", -1.0)
        view = await one.watch("a", "", 0)

    assert 1 == len(view.runs[0].abandoned)


async def locks_count(service, agent):
    """Return how many jobs a report locks that brings no news."""
    inventory, found = agent.inventory(), statements(service)
    await service.write(lambda c: report(c, [inventory], service.limits))
    return sum("FROM jobs" in said and "name" in said for said in found)


@pytest.mark.parametrize("end", ["fenced", "gone"])
async def test_a_restore_that_nobody_waits_for_costs_no_report_anything(
    database_url, agents, kit, end
):
    """Its decision stays open for ever: who left it so was fenced, or has ended."""
    counts, agent = [], agents[0]
    async with kit.running(database_url) as service:
        await service.report(agent.inventory())
        counts.append(await locks_count(service, agent))
        seat = await service.register(kit.wish(0, "a", world=2))
        agent.serve(seat, 0)
        await service.report(agent.inventory())
        assert await locks_count(service, agent) > counts[0]

        agent.ranks = ()
        if end == "fenced":  # a newer attempt's shard is found: the catalogue was lost once
            agent.hold(seat.run, 5, seat.generation + 3, 0)
            await service.report(agent.inventory())
        else:
            await service.change(lambda c: c.forget_leases())
            await service.report(agent.inventory())
        decision = await service.read(lambda c: c.load_run(seat.run).deciding)
        assert decision, "left open"
        counts.append(await locks_count(service, agent))
    assert counts[0] == counts[1]


def _supersede(catalogue, run):
    before = catalogue.load_run(run)
    given_up = AbandonedStep(run=run, step=7, generation=before.generation, reason="test")
    catalogue.save_run(before, replace(before, abandoned=(given_up,)))
