"""The catalogue over SQLite and Postgres: one suite, the same promises (F91)."""

import asyncio
import time
from dataclasses import replace

import pytest
from sqlalchemy import text

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.lines import MOVES_PER_RUN_MAX
from holdfast.core.node_view import SupersedeRule
from holdfast.core.user_events import Event
from holdfast.errors import AlreadyExistsError, InvalidRequestError, StaleGenerationError
from holdfast_services.kit.db import make_engine, read_transaction, write_transaction
from holdfast_services.metadata.domain.model import (
    Checkpoint,
    Limits,
    NoParent,
    Stored,
)
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.usecases.agents import pulse, tick


def run_view(view):
    (run,) = view.runs
    return run


async def commit_step(service, agents, seat, step):
    """Both ranks save, both nodes hold both shards."""
    for agent in agents:
        for rank, owner in enumerate(agents):
            agent.hold(seat.run, step, seat.generation, rank, owner=owner.name)
    for _ in range(2):  # the second time they say that they know of the commit
        for agent in agents:
            view = await service.report(agent.inventory())
        for agent in agents:
            agent.hear(await service.watch(agent.name, "", 0))
    return view


async def test_a_life_of_save_crash_restore_and_load(database_url, agents, kit):
    """F68, F74: from the first registration to the released pin."""
    async with kit.running(database_url) as service:
        first = await kit.launch(service, agents)
        view = await commit_step(service, agents, first, 10)
        key = CheckpointId(first.run, 10, first.generation)
        assert run_view(view).free_before == key
        assert run_view(view).committed[0].replicated

        second = await kit.launch(service, agents, b"second")
        view = await service.watch("a", "", 0)
        decision = run_view(view).decision
        assert decision.state is DecisionState.PROPOSED
        assert run_view(view).pinned == (decision.checkpoint,) == (key,)

        for loaded in (False, True):
            for rank, agent in enumerate(agents):
                agent.serve(second, rank, ready_decision=decision.number, loaded=loaded)
                view = await service.report(agent.inventory())
            assert run_view(view).decision.state is DecisionState.CONFIRMED
            assert run_view(view).pinned == (() if loaded else (key,))
        assert run_view(view).superseded[-1].after_step == 10


async def test_a_reason_that_postgres_cannot_hold_stops_no_report(database_url, agents, kit):
    """P4: a rank says why it gave a step up in words of the user's code, NUL among them."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        given_up = AbandonedStep(run=seat.run, step=5, generation=seat.generation, reason="a\0b")
        inventory = replace(agents[0].inventory(), abandoned=(given_up,))
        view = await service.report(inventory)
        await service.record("a", [Event(kind="k", severity="info", message="c\0d")])

        said = [row["message"] for row in await service.read(lambda c: c.last_events(9))]
    assert [one.step for one in run_view(view).abandoned] == [5]
    assert any(r"a\x00b" in text for text in said)
    assert any(r"c\x00d" in text for text in said)


async def test_every_call_may_be_repeated(database_url, agents, kit):
    """Idempotence: an agent that got no answer asks again and changes nothing."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        await commit_step(service, agents, seat, 10)
        before = (await service.world()).runs
        again = replace(agents[0].inventory(), sequence=agents[0].sequence - 1)

        assert await service.register(kit.wish(0, "a")) == seat
        views = [await service.report(again) for _ in range(3)]
        after = (await service.world()).runs

    def timeless(runs):
        return [replace(r, attempt=replace(r.attempt, lease_until_s=0)) for r in runs]

    assert timeless(after) == timeless(before)
    assert len({view.version for view in views}) == 1


async def test_an_older_incarnation_is_told_the_one_to_exceed(database_url, agents, kit):
    async with kit.running(database_url) as service:
        agents[0].incarnation = 7
        await service.report(agents[0].inventory())
        agents[0].incarnation = 3
        agents[0].hold("r0", 1, 1, 0)

        view = await service.report(agents[0].inventory())

        assert view.incarnation_min == 8
        assert (await service.world()).nodes["a"].inventory.shards == ()


async def test_a_second_launch_is_refused_and_the_refusal_is_news(database_url, agents, kit):
    """G12: the holder is named; the refused trainer changed nothing."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        with pytest.raises(AlreadyExistsError, match="holder of L"):
            await service.register(kit.wish(0, "a", b"other", launcher="M"))

        assert (await service.register(kit.wish(0, "a"))).generation == seat.generation
        kinds = [row["kind"] for row in await service.read(lambda c: c.last_events(10))]
        assert "attempt_refused" in kinds


async def test_a_replaced_attempt_may_not_register_again(database_url, agents, kit):
    """P2."""
    async with kit.running(database_url) as service:
        await kit.launch(service, agents)
        await kit.launch(service, agents, b"second")

        with pytest.raises(StaleGenerationError):
            await service.register(kit.wish(1, "b", b"first"))


async def test_many_ranks_at_many_services_get_one_generation(database_url, kit):
    """F93: 32 ranks at four metadata processes at once, each twice."""
    async with (
        kit.running(database_url) as one,
        kit.running(database_url) as two,
        kit.running(database_url) as three,
    ):
        services = [one, two, three]
        seats = await asyncio.gather(
            *(
                services[(rank + turn) % 3].register(kit.wish(rank, f"n{rank % 4}", world=32))
                for rank in range(32)
                for turn in range(2)
            )
        )
        world = await two.world()

    assert len(set(seats)) == 1
    assert len(world.runs[0].ranks) == 32


async def test_two_launches_racing_at_two_services_leave_one_holder(database_url, kit):
    async with kit.running(database_url) as one, kit.running(database_url) as two:
        answers = await asyncio.gather(
            one.register(kit.wish(0, "a", b"1", launcher="L1", world=1)),
            two.register(kit.wish(0, "b", b"2", launcher="L2", world=1)),
            return_exceptions=True,
        )

    assert sorted(type(answer).__name__ for answer in answers) == ["AlreadyExistsError", "Seat"]


async def test_services_that_decide_at_once_decide_once(database_url, kit):
    """Any number of processes: one row, one event of each decision, whoever took it."""
    agents = [kit.Agent(f"n{i}") for i in range(4)]
    async with kit.running(database_url) as one, kit.running(database_url) as two:
        services = [one, two]
        seat = await kit.launch(one, agents)
        for agent in agents:
            for rank, owner in enumerate(agents):
                agent.hold(seat.run, 10, seat.generation, rank, owner=owner.name, world=4)
        for turn in range(3):
            await asyncio.gather(
                *(services[(i + turn) % 2].report(a.inventory()) for i, a in enumerate(agents))
            )
        second = await kit.launch(two, agents, b"second")
        number = (await one.world()).runs[0].decision.number
        for rank, agent in enumerate(agents):
            agent.serve(second, rank, ready_decision=number)
        await asyncio.gather(*(services[i % 2].report(a.inventory()) for i, a in enumerate(agents)))
        run = (await one.world()).runs[0]
        events = await one.read(lambda c: c.last_events(100))

    assert run.decision.state is DecisionState.CONFIRMED
    assert len(run.checkpoints) == 1
    kinds = [row["kind"] for row in events]
    assert kinds.count("restore_proposed") == 1
    assert kinds.count("restore_confirmed") == 2, "one fresh, one restored"


async def test_a_pinned_row_is_not_expired(database_url, agents, kit):
    """4.7: the statement itself asks for the pin, so no order of events deletes it."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        await commit_step(service, agents, seat, 10)
        await kit.launch(service, agents, b"second")
        key = CheckpointId(seat.run, 10, seat.generation)

        assert await service.write(lambda c: c.forget_checkpoint(key)) is False
        assert len(await service.read(lambda c: c.checkpoints(seat.run))) == 1


async def test_a_confirmed_decision_cannot_be_written_over(database_url, agents, kit):
    """The database refuses what no process should try."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        before = (await service.world()).runs[0]
        assert before.decision.state is DecisionState.CONFIRMED
        forged = replace(before, decision=replace(before.decision, fresh=False))

        with pytest.raises(Exception, match="changed under its lock"):
            await service.write(lambda c: c.save_run(before, forged))

        assert (await service.read(lambda c: c.load_run(seat.run))).decision == before.decision


async def test_an_outage_leaves_leases_standing_and_its_newest_save_is_restored(
    database_url, agents, kit
):
    """P5, G18: ten saves without metadata, then the new attempt registers first.

    With two slots a rank holds the committed step and the newest afterwards (4.7).
    """
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        await commit_step(service, agents, seat, 10)
    for agent in agents:
        for rank, owner in enumerate(agents):
            agent.hold(seat.run, 20, seat.generation, rank, owner=owner.name)
    age(database_url, 600.0)

    async with kit.running(database_url) as service:
        for rank, agent in enumerate(agents):
            second = await service.register(kit.wish(rank, agent.name, b"second"))
            agent.serve(second, rank)
        assert (await service.world()).runs[0].decision.state is DecisionState.PENDING
        assert len((await service.world()).live) == 2
        for agent in agents:
            view = await service.report(agent.inventory())

    assert run_view(view).decision.checkpoint.step == 20


def age(url, seconds):
    """Move all times of the catalogue into the past, as an outage of ``seconds`` does."""
    engine = make_engine(url, connections_max=1)
    with write_transaction(engine) as db:
        for table, column in (
            ("pulse", "at_s"),
            ("nodes", "lease_until_s"),
            ("nodes", "reported_at_s"),
            ("attempts", "lease_until_s"),
            ("attempts", "started_at_s"),
            ("attempt_ranks", "registered_at_s"),
        ):
            db.execute(text(f"UPDATE {table} SET {column} = {column} - :s"), {"s": seconds})
    engine.dispose()


async def test_a_watch_answers_when_another_process_changes_the_view(database_url, agents, kit):
    """The condition of one process wakes at once, the poll finds what others did."""
    async with kit.running(database_url) as one, kit.running(database_url) as two:
        view = await one.report(agents[0].inventory())
        watching = asyncio.create_task(one.watch("a", view.version, 30))
        await two.report(agents[1].inventory())
        changed = await asyncio.wait_for(watching, 20)

    assert [peer.node for peer in changed.nodes] == ["a", "b"]
    assert changed.version != view.version


async def test_a_watch_of_an_unchanged_view_answers_at_its_deadline(database_url, agents, kit):
    async with kit.running(database_url) as service:
        view = await service.report(agents[0].inventory())
        assert (await service.watch("a", view.version, 0.01)) == view


async def test_a_view_says_which_inventory_it_knows_and_no_heartbeat_makes_it_another(
    database_url, agents, kit
):
    """ADR 0009: the agent puts the answers of reports and watches in order by it."""
    first, second = agents[0].inventory(), agents[0].inventory()
    async with kit.running(database_url) as service:
        views = [await service.report(first), await service.report(second)]
        late = await service.report(first)

    assert [view.taken for view in (*views, late)] == [
        (item.incarnation, item.sequence) for item in (first, second, second)
    ]
    assert views[0].version == views[1].version


async def test_lost_and_leaving_nodes_are_said_once(database_url, agents, kit):
    async with kit.running(database_url, Limits(node_lease_s=0.2), clock=True) as service:
        await service.report(agents[0].inventory())
        agents[1].leaving = True
        await service.report(agents[1].inventory())
        kinds = []
        ends = time.monotonic() + 20
        while kinds.count("node_lost") < 2 and time.monotonic() < ends:
            await service.changed(1.0)
            rows = await service.read(lambda c: c.last_events(100))
            kinds = [row["kind"] for row in rows]
        await service.changed(1.0)
        rows = await service.read(lambda c: c.last_events(100))

    assert sorted(r["node"] for r in rows if r["kind"] == "node_lost") == ["a", "b"]


async def test_news_of_agents_is_kept_and_bounded(database_url, kit):
    async with kit.running(database_url) as service:
        event = Event(
            kind="save_failed", severity="warning", message="x" * 9999, context={"a": "b"}
        )
        await service.record("a", [event])
        (row,) = await service.read(lambda c: c.last_events(10))
        with pytest.raises(InvalidRequestError):
            await service.record("a", [event] * 101)

    assert len(row["message"]) == 2000
    assert row["node"] == "a"


async def test_one_bad_inventory_does_not_harm_the_others(database_url, agents, kit):
    """A run id that belongs to another job is refused alone."""
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        await service.register(kit.wish(0, "a", job="other", world=1))
        liar = kit.Agent("c")
        liar.hold(seat.run, 1, 1, 0)
        liar.shards = [replace(h, shard=replace(h.shard, job="third")) for h in liar.shards]
        answers = await asyncio.gather(
            service.report(agents[0].inventory()),
            service.report(liar.inventory()),
            service.report(agents[1].inventory()),
            return_exceptions=True,
        )

    assert isinstance(answers[1], InvalidRequestError)
    assert not isinstance(answers[0], Exception)
    assert not isinstance(answers[2], Exception)


async def test_migrations_may_run_from_many_processes_at_once(database_url):
    engines = [make_engine(database_url, connections_max=1) for _ in range(4)]
    await asyncio.gather(*(asyncio.to_thread(upgrade, engine) for engine in engines))
    with read_transaction(engines[0]) as db:
        assert Catalogue(db, DecodeCache()).pulse_s() == 0.0
    for engine in engines:
        engine.dispose()


async def test_the_clock_is_the_databases(database_url, kit):
    async with kit.running(database_url) as service:
        now_s = await service.read(lambda c: c.now_s())

    assert abs(now_s - time.time()) < 60


async def test_a_node_that_is_late_by_a_moment_costs_no_committed_step(database_url, agents, kit):
    """P5, 4.8; defect A4: b's agent restarts with the job; only b has the rest of step 30."""
    async with kit.running(database_url) as service:
        first = await kit.launch(service, agents)
        await commit_step(service, agents, first, 20)
        for rank, agent in enumerate(agents):
            agent.hold(first.run, 30, first.generation, rank)
            await service.report(agent.inventory())
        agents[1].leaving = True
        await service.report(agents[1].inventory())

        for rank, agent in enumerate(agents):
            second = await service.register(kit.wish(rank, agent.name, b"second"))
            agent.serve(second, rank)
            agent.leaving, agent.incarnation = False, agent.incarnation + rank
            view = await service.report(agent.inventory())
            state = (DecisionState.PENDING, DecisionState.PROPOSED)[rank]
            assert run_view(view).decision.state is state

    assert run_view(view).decision.checkpoint.step == 30


async def test_a_run_with_as_many_rules_as_there_may_be_is_read_as_the_rules_say(
    database_url, agents, kit
):
    """P5; defect A5: SQL must leave out what a rule covers, and nothing else."""
    rules = tuple(
        SupersedeRule(after_step=10 * number, below_generation=number + 1)
        for number in range(1, MOVES_PER_RUN_MAX + 1)
    )
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)

        def fill(catalogue):
            run = catalogue.load_run(seat.run)
            keys = [CheckpointId(run.id, s, g) for s, g in ((10, 1), (11, 1), (500, 50), (501, 50))]
            last = MOVES_PER_RUN_MAX
            keys += [CheckpointId(run.id, 10 * last + n, last + n) for n in (0, 1)]
            catalogue.save_run(run, replace(run, rules=rules))
            for key in keys:
                row = Checkpoint(
                    id=key, world_size=2, plan_hash="p", length_bytes=1,
                    local_at_s=1.0, durable_at_s=2.0,
                )  # fmt: skip
                catalogue.put_checkpoints([row])
                agents[0].hold(key.run, key.step, key.generation, 0)
                lies = Stored(checkpoint=key, shards=(agents[0].shards[-1].shard,))
                catalogue.put_object(lies, manifest_digest=b"", verified_at_s=None)
            return keys

        keys = await service.write(fill)
        run = await service.read(lambda c: c.load_run(seat.run))

    standing = {row.id for row in run.checkpoints if row.id.generation != run.generation}
    assert standing == {key for key in keys[1:] if run.usable(key)} == {keys[2], *keys[4:]}


@pytest.mark.parametrize(
    ("parent", "columns"),
    [
        (NoParent.BEGAN, (None, None)),
        (NoParent.UNKNOWN, (50, 2)),
        (CheckpointId("r1", 40, 1), (40, 1)),
    ],
    ids=["began", "unknown", "restored"],
)
async def test_a_parent_comes_back_from_its_row(database_url, kit, parent, columns):
    """The form in which earlier versions wrote the three cases, too."""
    row = Checkpoint(
        id=CheckpointId("r1", 50, 2), world_size=2, plan_hash="p", length_bytes=1,
        local_at_s=1.0, parent=parent,
    )  # fmt: skip
    async with kit.running(database_url) as service:
        await service.write(lambda catalogue: catalogue.put_checkpoints([row]))
        found = await service.read(lambda catalogue: catalogue.checkpoint(row.id))
    engine = make_engine(database_url, connections_max=1)
    with read_transaction(engine) as db:
        sql = text("SELECT parent_step, parent_generation FROM checkpoints")
        written = [tuple(line) for line in db.execute(sql)]
    engine.dispose()

    assert parent == found.parent
    assert [columns] == written


async def test_a_clock_that_steps_back_keeps_no_dead_node_and_no_name(database_url, agents, kit):
    """P5, 4.0; defect B2: an hour ahead, set right; then b dies. c never comes back either."""
    limits = Limits(node_lease_s=0.5, decide_wait_s=0.5)
    async with kit.running(database_url, limits) as service:
        await service.report(kit.Agent("c").inventory())
        seat = await kit.launch(service, agents)
        await commit_step(service, agents, seat, 10)
        for rank, agent in enumerate(agents):
            agent.hold(seat.run, 20, seat.generation, rank)
            await service.report(agent.inventory())
        age(database_url, -3600.0)
        before = await service.world()
        assert before.live.keys() >= {"a", "b", "c"}

        await service.write(lambda c: tick(c, limits))
        after = await service.world()
        reported = {name: node.reported_at_s for name, node in after.nodes.items()}
        until_s = {node.lease_until_s for node in after.nodes.values()}
        run = await service.read(lambda c: c.load_run(seat.run))  # a snapshot may be of before
        until_s.add(run.attempt.lease_until_s)

        assert max(until_s) <= after.now_s + 0.5
        assert max(reported.values()) < run.attempt.started_at_s <= after.now_s
        ends = time.monotonic() + 20
        while (await service.world()).live and time.monotonic() < ends:
            await service.changed(0.1)
        other = await service.register(kit.wish(0, "a", b"other", launcher="M", world=1))
        assert other.generation > seat.generation


async def test_a_beat_that_waited_for_another_is_no_clock_that_steps_back(
    database_url, agents, kit
):
    """P5; B2: a transaction's own time is from before it waited; nobody's lease is cut by it."""
    async with kit.running(database_url) as service:
        await kit.launch(service, agents)
        nodes = (await service.world()).nodes

        def late(catalogue):
            pulse(catalogue, catalogue.now_s() - 9.0, service.limits)

        await service.write(late)

        assert (await service.world()).nodes == nodes
