"""Calls that wait for the catalogue together: one nonce, one generation, whoever they meet."""

import asyncio
from dataclasses import replace

from tests.said import rank_status

from holdfast.errors import StaleGenerationError
from holdfast_services.metadata.calls.batch import Batch
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.model import Node
from holdfast_services.metadata.usecases import agents


async def together(service, wishes):
    """Register all in one transaction; return generations, or the kind of the refusal."""
    items = [agents.SeatWish(wish, first_run(wish.spec.job)) for wish in wishes]
    answers = await service.write(lambda c: agents.register(c, items, service.limits))
    return [getattr(answer, "generation", type(answer)) for answer in answers]


async def test_two_attempts_in_one_batch_keep_one_generation_each(database_url, kit):
    """M1, P2; defect B1: the older attempt's ranks still wait when the newer one's come."""
    async with kit.running(database_url) as service:
        first = [kit.wish(rank, "ab"[rank], b"first") for rank in (0, 1)]
        second = [kit.wish(rank, "ab"[rank], b"second") for rank in (0, 1)]

        met = await together(service, [first[0], second[0], first[1]])
        rest = await together(service, [second[1], first[0]])

        assert [1, 2, StaleGenerationError] == met
        assert [2, StaleGenerationError] == rest
        run = (await service.world()).runs[0]

    assert (2, b"second", [0, 1]) == (
        run.generation,
        run.current.spec.nonce,
        [rank.rank for rank in run.ranks],
    )


async def test_who_has_gone_while_waiting_is_not_asked_for():
    """P2; defect B1: a killed rank's call must not replace the attempt that came after it."""
    asked = []
    busy, go = asyncio.Event(), asyncio.Event()

    async def run_all(questions):
        asked.append(list(questions))
        busy.set()
        await go.wait()
        return [question.upper() for question in questions]

    batch = Batch(run_all)
    first = asyncio.create_task(batch.ask("a"))
    await busy.wait()
    gone, there = (asyncio.create_task(batch.ask(word)) for word in "bc")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    go.set()

    assert ["A", "C"] == await asyncio.gather(first, there)
    assert [["a"], ["c"]] == asked


async def test_who_waits_for_a_change_is_not_woken_by_progress(database_url, kit):
    """Defect C4: else each step of each rank has every node's view made anew."""
    agent, run = kit.Agent("a"), first_run(kit.JOB)
    woken = []
    async with kit.running(database_url) as service:
        for change in ("joins", "lives", "opens", "trains", "holds", "lives"):
            if change in ("opens", "trains"):
                step = 5 if change == "trains" else 0
                agent.ranks = (rank_status(job=kit.JOB, run=run, generation=1, rank=0, step=step),)
            if change == "holds":
                agent.hold(run, 1, 1, 0, world=1)
            waiting = asyncio.create_task(service.changed(60))
            await asyncio.sleep(0)
            await service.report(agent.inventory())
            await asyncio.sleep(0)
            woken.append(change if waiting.done() else "")
            waiting.cancel()

    assert woken == ["joins", "", "opens", "", "holds", ""]


def test_a_heartbeat_reads_no_job_that_has_ended(kit):
    """Defect C4: a node may hold what hundreds of them have left."""
    agent, other = kit.Agent("a"), first_run("other")
    agent.ranks = tuple(
        rank_status(job=job, run=run, generation=1, rank=0, live=live)
        for job, run, live in (("ended", first_run("ended"), False), ("other", other, True))
    )
    agent.hold(first_run(kit.JOB), 1, 1, 0, world=1)
    first, second = agent.inventory(), agent.inventory()
    agent.shards.clear()
    fewer = agent.inventory()
    known = {"a": Node(inventory=first, reported_at_s=5.0, lease_until_s=9.0)}

    everybody = {kit.JOB, "ended", "other"}
    assert agents.jobs_of([first], {}, 6.0).keys() == everybody
    assert agents.jobs_of([second], known, 6.0) == {"other": other}
    assert agents.jobs_of([fewer], known, 6.0).keys() == {kit.JOB, "other"}
    leaves, again = (replace(second, **said) for said in ({"leaving": True}, {"incarnation": 9}))
    assert agents.jobs_of([leaves], known, 6.0).keys() == everybody
    assert agents.jobs_of([again], known, 6.0).keys() == everybody
    assert agents.jobs_of([fewer], known, 9.0).keys() == everybody
    assert agents.jobs_of([second], known, 9.0).keys() == everybody  # it was lost meanwhile
