"""The scheduler over real databases: what becomes of jobs, whoever is killed, doubled or away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.integration.scheduler.cluster import Cluster

from holdfast.core.executions import ExecutorReport, ExecutorRequest, Outcome
from holdfast.core.hints import JobHints, StepPoint
from holdfast.errors import (
    AlreadyExistsError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast_services.scheduler.calls import executors as calls
from holdfast_services.scheduler.domain.cluster import Cluster as Nodes
from holdfast_services.scheduler.domain.families import family_of
from holdfast_services.scheduler.domain.job import State, moved
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.domain.orders import allocation
from holdfast_services.scheduler.planning import Planner
from holdfast_services.scheduler.usecases import deciding
from holdfast_services.scheduler.usecases.deciding import Heard


async def test_a_job_is_planned_granted_allocated_started_and_ends(database_url, tmp_path):
    """F95, F101, F105; each node has the GPUs that the plan says, and metadata was told."""
    async with Cluster(database_url, tmp_path, a=1, b=1) as cluster:
        scheduler = cluster.scheduler()
        job = await cluster.train(scheduler, "gpt", 2)
        launch = (await cluster.metadata.read(lambda c: c.launches()))[0]
        assert launch.allocated == job.number
        assert {m.node: m.devices for m in launch.members} == {"a": (0,), "b": (0,)}

        for node in cluster.nodes.values():
            (key,) = node.launchers
            await node.say(key, finished=True)
        ended = await cluster.until_state("gpt", State.ENDED)

        async def settled():
            return (await scheduler.job("gpt")).settled

        await cluster.until(settled, "all of it is free")
        assert not await cluster.metadata.read(lambda c: c.launches())
        assert [entry.state.value for entry in ended.history] == [
            "queued", "starting", "running", "ended",
        ]  # fmt: skip


async def test_what_a_job_has_measured_is_known_to_the_next_of_its_family(database_url, tmp_path):
    """Also to a scheduler that was not there; and what one took in all, once it has ended."""
    points = [
        StepPoint(nodes=1, replicas=n, local_batch=32, compute_s=0.1, step_s=0.11, count=9)
        for n in (1, 2)
    ]
    hints = JobHints(
        initial_batch=64, batch=64, batch_max=4096, local_max=64, points=tuple(points), sqr=1.0,
        var=4e6, progress=50.0,
    )  # fmt: skip
    said = {}

    async def knowledge(now_s):
        return {name: Knowledge(hints=of, at_s=now_s) for name, of in said.items()}

    async with Cluster(database_url, tmp_path, a=8) as cluster:
        scheduler = cluster.scheduler(policy="price")
        scheduler.metadata.knowledge = knowledge
        said["first"] = hints
        job = await cluster.train(scheduler, "first", 1, 1)
        await cluster.nodes["a"].end("first")
        await cluster.until_state("first", State.ENDED)
        del said["first"]

        async def settled():
            return (await scheduler.job("first")).settled

        await cluster.until(settled, "all of it is free")
        await scheduler.kill()
        cluster.schedulers.remove(scheduler)
        other = cluster.scheduler("s2", policy="price")
        second = await cluster.train(other, "second", 1, 8)

        assert (job.gpus, second.gpus) == (1, 4), "twice what was measured"
        _, kept = await other.transactions.read(lambda s: s.hint("first"))
        assert kept.ended
        assert kept.hints.progress == 50.0
        assert kept.began.var == 4e6


async def test_what_an_earlier_submission_measured_stays_until_the_new_one_says_something(
    database_url, tmp_path
):
    """It goes on from that one's checkpoints: what its saves cost is known from the start."""
    point = StepPoint(nodes=1, replicas=8, local_batch=8, compute_s=0.1, step_s=0.2, count=9)
    hints = JobHints(initial_batch=64, batch=64, points=(point,))
    async with Cluster(database_url, tmp_path) as cluster:
        scheduler = cluster.scheduler(starts=False)
        job = await scheduler.submit("gpt")
        turn = deciding.Turn(
            jobs={"gpt": job}, cluster=Nodes(nodes={}), changed=False, news=False, now_s=1.0
        )
        old = Knowledge(hints=hints, family=family_of(job.spec), ended=True)
        write = scheduler.transactions.write

        def learn(said):
            return write(lambda s: deciding.learn(s, turn, {"gpt": said}))

        await write(lambda s: s.save_hints("gpt", "id-before", old))
        learned = await learn(Knowledge(step=9, costs={"stall_s": 1.0}))
        assert learned.past == (old,)
        assert learned.jobs["gpt"].hints is None
        assert learned.jobs["gpt"].costs == {"stall_s": 1.0}
        assert (await write(lambda s: s.hint("gpt"))) == ("id-before", old)

        said = replace(hints, progress=1.0)
        learned = await learn(Knowledge(step=10, hints=said))
        assert learned.past == ()
        submission, kept = await write(lambda s: s.hint("gpt"))
        assert (submission, kept.hints, kept.ended) == (job.id, said, False)


async def test_what_is_known_of_jobs_that_have_settled_is_bounded(database_url, tmp_path):
    """Those that were submitted last stay; of jobs that go on nothing is forgotten."""
    async with Cluster(database_url, tmp_path) as cluster:
        scheduler = cluster.scheduler(starts=False)

        def settle(statements, name):
            kept = statements.job(name)
            statements.save_hints(name, kept.job.id, Knowledge(step=1))
            if name != "j1":
                statements.save_job(kept, moved(kept.job, State.CANCELLED, 1.0))

        for number in range(6):
            await scheduler.submit(f"j{number}")
            await scheduler.transactions.write(lambda s, n=number: settle(s, f"j{n}"))
        await scheduler.transactions.write(lambda s: s.forget_hints(3))

        assert {"j1", "j3", "j4", "j5"} == (
            await scheduler.transactions.read(lambda s: s.hints())
        ).keys()


async def test_who_comes_next_gets_the_gpus_once_they_are_free(database_url, tmp_path):
    async with Cluster(database_url, tmp_path, a=1) as cluster:
        scheduler = cluster.scheduler()
        await cluster.train(scheduler, "first")
        await scheduler.submit("second")
        await cluster.nodes["a"].live(scheduler)
        assert (await scheduler.job("second")).state is State.QUEUED

        await scheduler.cancel("first")
        await cluster.until_state("second", State.RUNNING)
        assert (await scheduler.job("first")).state is State.CANCELLED


async def test_the_same_submission_twice_is_one_and_another_is_refused(database_url, tmp_path):
    async with Cluster(database_url, tmp_path, a=1) as cluster:
        scheduler = cluster.scheduler(starts=False)
        first = await scheduler.submit("gpt")
        again = await scheduler.submit("gpt")
        assert first == again
        with pytest.raises(AlreadyExistsError, match="gpt is queued, with another spec"):
            await scheduler.submit("gpt", 1, 8)
        await cluster.nodes["a"].live(scheduler)
        with pytest.raises(ExhaustedError, match=r"1 nodes x 1 = 1"):
            await scheduler.submit("wide", 2)
        with pytest.raises(NotFoundError, match="no job nowhere"):
            await scheduler.cancel("nowhere")
        await scheduler.cancel("gpt")
        scheduler.leader.start()
        await cluster.until_state("gpt", State.CANCELLED)
        with pytest.raises(PreconditionError, match="gpt is cancelled"):
            await scheduler.cancel("gpt")
        await cluster.train(scheduler, "gpt")


async def test_of_two_schedulers_one_plans_and_the_other_goes_on_when_it_is_killed(
    database_url, tmp_path, monkeypatch
):
    """The second answers requests all the while; a killed one is waited for as long as a lease."""
    monkeypatch.setattr(deciding, "LEASE_S", 2.0)
    monkeypatch.setattr(deciding, "RENEW_S", 1.5)
    async with Cluster(database_url, tmp_path, a=1, b=1) as cluster:
        first = cluster.scheduler("s1")
        await cluster.train(first, "gpt")
        second = cluster.scheduler("s2")
        await second.submit("next")
        await cluster.until_state("next", State.RUNNING, second)
        lease = await second.lease()
        assert (lease.holder, lease.fence) == ("s1", 1)

        cluster.schedulers.remove(first)
        await first.kill()
        await second.cancel("gpt")
        await second.submit("third")
        await cluster.until_state("third", State.RUNNING, second)
        lease = await second.lease()
        assert (lease.holder, lease.fence) == ("s2", 2)
        assert (await second.job("next")).state is State.RUNNING


class SlowPlanner(Planner):
    """Has no plan before another scheduler could have taken a lease that is not renewed."""

    def __init__(self, scheduler):
        super().__init__("fifo", {})
        self._scheduler = scheduler

    async def __call__(self, turn, known, *, arrivals):
        enough_s = (await self._scheduler.lease()).until_s + 2.0
        while await self._scheduler.transactions.read(lambda s: s.now_s()) <= enough_s:  # noqa: ASYNC110 - the database says nothing by itself
            await asyncio.sleep(0.05)
        return await super().__call__(turn, known, arrivals=arrivals)


async def test_a_plan_that_takes_longer_than_a_lease_counts_though_another_waits_for_it(
    database_url, tmp_path, monkeypatch
):
    """Else the two would take the lease from each other for ever, and no plan would be kept."""
    monkeypatch.setattr(deciding, "LEASE_S", 2.0)
    monkeypatch.setattr(deciding, "RENEW_S", 1.5)
    async with Cluster(database_url, tmp_path, a=1) as cluster:
        for name in ("s1", "s2"):
            scheduler = cluster.scheduler(name, starts=False)
            scheduler.leader._planner = SlowPlanner(scheduler)
            scheduler.leader.start()
        await cluster.train(scheduler, "gpt")


async def test_one_that_was_stopped_and_wakes_up_changes_nothing(database_url, tmp_path):
    """It holds a fence of before: a plan of its own, a grant, an allocation are all refused."""
    async with Cluster(database_url, tmp_path, a=1) as cluster:
        old = cluster.scheduler("s1", starts=False)
        holding = await old.transactions.write(lambda s: deciding.hold(s, "s1"))
        await old.transactions.write(lambda s: deciding.give_up(s, holding))
        new = cluster.scheduler("s2")
        job = await cluster.train(new, "gpt")

        heard = Heard(rounds={}, agents={}, for_s=0.0)
        plan = await new.transactions.read(lambda s: s.newest_plan())
        for decide in (
            lambda s: deciding.take_turn(s, holding, heard),
            lambda s: deciding.keep_plan(s, holding, plan),
        ):
            with pytest.raises(StaleGenerationError, match="another scheduler plans: s2"):
                await old.transactions.write(decide)
        stale = replace(allocation(job), number=job.number - 1, shares=())
        with pytest.raises(StaleGenerationError, match=f"has allocation {job.number}"):
            await old.metadata.allocate("gpt", stale)
        assert (await new.job("gpt")).state is State.RUNNING


@pytest.mark.parametrize("at", ["planned", "granted", "told"])
async def test_whoever_comes_after_a_killed_scheduler_goes_on_where_it_was(
    database_url, tmp_path, at, monkeypatch
):
    """Killed between plan and grant, grant and allocation, allocation and orders; twice."""
    monkeypatch.setattr(deciding, "LEASE_S", 0.5)
    monkeypatch.setattr(deciding, "RENEW_S", 0.4)
    async with Cluster(database_url, tmp_path, a=1, b=1) as cluster:
        idle = cluster.scheduler("idle", starts=False)
        for node in cluster.nodes.values():
            await node.live(idle)
        await idle.submit("gpt", 2)
        for life in ("s1", "s2"):
            doomed = cluster.scheduler(life, starts=False)
            await killed_at(doomed, at)
        last = cluster.scheduler("s3")
        job = await cluster.until_state("gpt", State.RUNNING, last)

        assert job.shares == {"a": 1, "b": 1}
        assert job.outside_at_s == ()
        assert (await last.lease()).fence >= 3


def have_it_die(scheduler, at, die):
    """Put ``die`` in the way of what comes next at that point."""
    leader = scheduler.leader
    take, write, calls = leader._take_turn, scheduler.transactions.write, []

    async def second_turn(holding):
        calls.append(1)
        return await (take(holding) if len(calls) == 1 else die())

    async def writing(use_case):
        answer = await write(use_case)
        kept = await scheduler.transactions.read(lambda s: s.job("gpt"))
        return await die() if kept.job.told else answer

    if at == "planned":
        leader._take_turn = second_turn
    elif at == "granted":
        leader._tell = die
    else:
        leader._orders_changed = lambda: None
        scheduler.transactions.write = writing


async def killed_at(scheduler, at):
    """Have a scheduler decide up to a point, and no further."""
    leader, died = scheduler.leader, asyncio.Event()

    async def die(*_args):
        died.set()
        await asyncio.Event().wait()

    DEATHS[at](scheduler, die)
    leader.start()
    await asyncio.wait_for(died.wait(), 30)
    for task in leader._tasks:
        task.cancel()
    await asyncio.wait(leader._tasks)
    leader._holding = None  # what it knew has gone with it


def before_its_grant(scheduler, die):
    turns = []
    take = scheduler.leader._take_turn

    async def take_turn(holding):
        turns.append(holding)
        return await (take(holding) if len(turns) == 1 else die())

    scheduler.leader._take_turn = take_turn


def before_its_allocation(scheduler, die):
    scheduler.leader._tell = die


def before_its_orders(scheduler, die):
    write = scheduler.transactions.write

    async def writing(use_case):
        answer = await write(use_case)
        return answer if (await scheduler.job("gpt")).told == 0 else await die()

    scheduler.transactions.write = writing


DEATHS = {"planned": before_its_grant, "granted": before_its_allocation, "told": before_its_orders}


async def test_half_a_start_is_none_and_the_script_is_told_by_its_message(database_url, tmp_path):
    """An executor that fails half-way: all or nothing, and the job begins again (F98)."""
    async with Cluster(database_url, tmp_path, a=1, b=1) as cluster:
        scheduler = cluster.scheduler()
        cluster.nodes["b"].fails = {"gpt": Outcome.KILLED}
        await scheduler.submit("gpt", 2)

        async def refused():
            return "killed here" in (await scheduler.job("gpt")).message

        await cluster.until(refused, "its start has failed")
        cluster.nodes["b"].fails = {}
        job = await cluster.until_state("gpt", State.RUNNING)
        assert len(job.outside_at_s) >= 1

        await cluster.nodes["a"].end("gpt", Outcome.FAILED, 1, "rank 0: ValueError: bad batch")
        failed = await cluster.until_state("gpt", State.FAILED)
        assert failed.message == "rank 0: ValueError: bad batch"


async def test_while_metadata_is_out_jobs_go_on_and_people_are_told_since_when(
    database_url, tmp_path
):
    """P4. What is submitted meanwhile starts once it is back."""
    async with Cluster(database_url, tmp_path, a=1, b=1) as cluster:
        scheduler = cluster.scheduler()
        before = await cluster.train(scheduler, "gpt")
        await cluster.silence()

        async def out():
            return (await scheduler.lease()).metadata_out_since_s > 0

        await cluster.until(out, "it is noticed")
        await scheduler.submit("next")
        for _ in range(5):
            for node in cluster.nodes.values():
                await node.live(scheduler)
            await asyncio.sleep(0.1)
        assert (await scheduler.job("gpt")).parts == before.parts
        assert (await scheduler.job("gpt")).state is State.RUNNING
        assert (await scheduler.job("next")).told == 0

        cluster._rest = type(cluster._rest)(f"127.0.0.1:{cluster._rest.url.rpartition(':')[2]}")
        await cluster.serve()
        await cluster.until_state("next", State.RUNNING)
        assert (await scheduler.lease()).metadata_out_since_s == 0


async def test_a_node_has_one_executor_and_its_report_counts_by_its_number(database_url, tmp_path):
    async with Cluster(database_url, tmp_path, a=1) as cluster:
        scheduler = cluster.scheduler(starts=False)
        ask = scheduler.executors.ask
        mine = ExecutorReport(executor="1" * 32, sequence=5, gpus=4)
        await ask("a", ExecutorRequest(report=mine))
        await ask("a", ExecutorRequest(report=replace(mine, sequence=4, gpus=9)))
        (row,) = await scheduler.transactions.read(lambda s: s.executors())
        assert row.report.gpus == 4

        other = ExecutorRequest(report=replace(mine, executor="2" * 32))
        with pytest.raises(AlreadyExistsError, match="node a has another executor"):
            await ask("a", other)
        await scheduler.executors.leave("a", "1" * 32)
        await ask("a", other)


async def test_an_executor_that_waits_is_answered_as_the_scheduler_ends(
    database_url, tmp_path, monkeypatch
):
    """Else each end waits as long as the server's grace, and jobs have no scheduler meanwhile."""
    monkeypatch.setattr(calls, "_POLL_S", 3600.0)
    async with Cluster(database_url, tmp_path, a=1) as cluster, asyncio.timeout(60):
        executors = cluster.scheduler(starts=False).executors
        mine = ExecutorReport(executor="1" * 32, sequence=1, gpus=4)
        known = await executors.ask("a", ExecutorRequest(report=mine))
        request = ExecutorRequest(report=mine, version=known.version, wait_s=known.poll_s)
        waits = asyncio.create_task(executors.ask("a", request))
        await executors.ask("a", ExecutorRequest(report=mine))

        executors.end()

        assert known == await waits
        assert known == await executors.ask("a", request)


async def test_a_thousand_jobs_at_once(database_url, tmp_path):
    """Each is taken on, and planned in one go; nothing waits for what it does not need."""
    async with Cluster(database_url, tmp_path, a=4) as cluster:
        scheduler = cluster.scheduler()
        await cluster.nodes["a"].live(scheduler)
        await asyncio.gather(*(scheduler.submit(f"job-{n:04}") for n in range(1000)))

        async def running():
            kept = await scheduler.transactions.read(lambda s: s.open_jobs())
            return sum(one.job.state is State.RUNNING for one in kept) == 4 and len(kept) == 1000

        await cluster.until(running, "as many run as there are GPUs")
        plan = await scheduler.transactions.read(lambda s: s.newest_plan())
        assert len(plan.by_job) == 1000
        assert plan.took_s < 60


async def test_a_database_that_is_away_ends_nothing(own_postgres, own_url, tmp_path):
    """Executors are told that nobody answers, and keep what they run; then all goes on (P4)."""
    async with Cluster(own_url, tmp_path, a=1, b=1) as cluster:
        scheduler = cluster.scheduler()
        before = await cluster.train(scheduler, "gpt")
        own_postgres.stop()
        try:
            request = ExecutorRequest(report=replace(cluster.nodes["a"].report, sequence=1000))
            with pytest.raises(UnavailableError):
                await scheduler.executors.ask("a", request)
            assert cluster.nodes["a"].launchers
        finally:
            own_postgres.start()
        cluster.nodes["a"].report = replace(cluster.nodes["a"].report, sequence=2000)
        await scheduler.submit("next")
        await cluster.until_state("next", State.RUNNING)

        job = await scheduler.job("gpt")
        assert job.parts == before.parts
        assert job.state is State.RUNNING
