"""Restores from the object store, jobs of other clusters, erased arenas, older catalogues."""

import asyncio
from dataclasses import replace

import pytest
from alembic import command
from alembic.config import Config
from tests.integration.metadata.tier import tier_over, until
from tests.said import changed_wish

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import RankStatus
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.persistence_work import CheckpointWork
from holdfast.core.sources import Memory, Object
from holdfast.errors import UnavailableError
from holdfast.format.keys import manifest_key
from holdfast.format.manifest import encode
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata import migrations
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.usecases import workers
from holdfast_services.persistence.manifest import planned


async def test_a_job_restores_from_the_object_store_and_its_rows_are_few(database_url, agents, kit):
    """F67, F74: 40 durable checkpoints, memory gone; a change reads a bounded number of rows."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents, rule=PersistRule(steps=1))
        for step in range(1, 41):
            for agent in agents:
                agent.shards = []
            await tier.commit(agents, seat, step)
            key = CheckpointId(seat.run, step, 1)
            await tier.drained(key)
            await tier.durable(key)
        assert len((await tier.run()).checkpoints) <= 16
        assert 40 == len(await tier.service.read(lambda c: c.checkpoints(seat.run)))

        for agent in agents:
            agent.shards = []
        second = await tier.launch(agents, b"second")
        decision = (await tier.run()).decision
        assert (DecisionState.PROPOSED, 40) == (decision.state, decision.checkpoint.step)
        view = await tier.service.watch("a", "", 0)
        assert [(Object(),)] * 2 == [want.sources for want in view.wants]
        for rank, agent in enumerate(agents):
            agent.serve(second, rank, ready_decision=decision.number)
            await tier.service.report(agent.inventory())
        run = await tier.run()
        assert DecisionState.CONFIRMED is run.decision.state
        assert len(run.checkpoints) <= 16


@pytest.mark.parametrize("same", [True, False], ids=["its manifest", "another"])
async def test_what_drains_by_an_older_catalogue_is_durable_by_its_manifest(
    database_url, agents, kit, same
):
    """P5, P6, A9: the backup is from while it drained; all memory is gone, the bucket has it.

    A manifest of other shards proves nothing of them.
    """
    store = MemoryStore()
    async with tier_over(database_url, kit, offers=False) as tier:
        tier.service.archive = BucketArchive(tier.service, store)
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        shards = await tier.service.read(lambda c: c.drained_shards(key))
        if not same:
            shards = [replace(shard, root_digest=b"x" * 16) for shard in shards]
        plan = CheckpointWork(checkpoint=key, job=kit.JOB, shards=tuple(shards), created_at_s=1.0)
        store.put(manifest_key(kit.JOB, key), encode(planned(plan)))

        for agent in agents:
            agent.shards = []
        await tier.launch(agents, b"second")

        row, decision = await tier.row(key), (await tier.run()).decision
        assert (row.durable_at_s is not None) is same
        assert (key if same else None) == decision.checkpoint
        assert not row.draining, "what cannot be had any more is given up"
        assert () == await tier.service.read(lambda c: c.drained_shards(key))


async def test_a_job_with_nothing_but_damaged_objects_is_lost_not_new(database_url, agents, kit):
    """P4: never a silent fresh start over checkpoints that somebody might still mend."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)
        await tier.scrubbed(key, ShardId(seat.run, 10, 1, 0))
        for agent in agents:
            agent.shards = []
        await tier.launch(agents, b"second")

        decision = (await tier.run()).decision
        assert DecisionState.LOST is decision.state
        assert "damaged" in decision.reason


async def test_what_is_damaged_in_the_store_and_whole_with_memory_is_restored(
    database_url, agents, kit
):
    """4.8, G20: every shard has a source, so no older step is taken."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        for step in (10, 20):
            await tier.commit(agents, seat, step)
            key = CheckpointId(seat.run, step, 1)
            await tier.drained(key)
            await tier.durable(key)
        await tier.scrubbed(key, ShardId(seat.run, 20, 1, 0))
        survivor, replaced = agents
        survivor.shards = [h for h in survivor.shards if h.shard.id == ShardId(seat.run, 20, 1, 0)]
        replaced.shards = []
        for agent in agents:
            await tier.service.report(agent.inventory())
        await tier.launch(agents, b"second")

        decision = (await tier.run()).decision
        assert (DecisionState.PROPOSED, 20) == (decision.state, decision.checkpoint.step)
        wants = (await tier.service.watch(replaced.name, "", 0)).wants
        assert [(Memory(survivor.name),), (Object(),)] == [want.sources for want in wants]


class Shelf:
    """An archive that counts who asks and fails when told to."""

    def __init__(self, error=None):
        self.asked, self.error, self.open = [], error, asyncio.Event()
        self.open.set()

    async def adopt(self, job):
        self.asked.append(job)
        await self.open.wait()
        if self.error:
            raise self.error


class Looks(dict):
    """Questions under way, and how many ranks have looked for one: from then on each waits."""

    count = 0

    def get(self, job):
        self.count += 1
        return super().get(job)


async def test_the_archive_is_asked_once_before_a_job_is_called_new(database_url, agents, kit):
    """F74, A9: ranks that come together share one question; a known attempt asks none."""
    async with tier_over(database_url, kit, offers=False) as tier:
        tier.service.archive = shelf = Shelf()
        tier.service.register.__self__._asking = looks = Looks()
        shelf.open.clear()
        wishes = [tier.service.register(kit.wish(rank, "a", world=8)) for rank in range(8)]
        asking = asyncio.gather(*wishes)
        await until(lambda: _true(looks.count == 8))
        shelf.open.set()
        await asking
        assert [kit.JOB] == shelf.asked

        seat = await tier.launch(agents, b"second")
        assert 2 == len(shelf.asked), "each attempt asks"
        await tier.commit(agents, seat, 10)
        await tier.launch(agents, b"third")
        assert 3 == len(shelf.asked), "the catalogue may be older than the bucket"


async def _true(value):
    return bool(value)


async def test_a_store_that_does_not_answer_is_never_a_fresh_start(database_url, kit, monkeypatch):
    """F74, architecture 4.8: unreachable is an error after a deadline, not "no checkpoint"."""
    monkeypatch.setattr("holdfast_services.metadata.calls.registrations.ARCHIVE_S_MAX", 0.05)
    async with tier_over(database_url, kit, offers=False) as tier:
        tier.service.archive = Shelf(UnavailableError("no route to the store"))
        with pytest.raises(UnavailableError, match="no route"):
            await tier.service.register(kit.wish(0, "a"))
        tier.service.archive = silent = Shelf()
        silent.open.clear()
        with pytest.raises(UnavailableError, match="did not list"):
            await tier.service.register(kit.wish(0, "a"))
        assert await tier.service.read(lambda c: c.run_of(kit.JOB)) is None


async def test_a_job_that_is_known_restarts_though_the_store_does_not_answer(
    database_url, agents, kit, monkeypatch
):
    """P5; defect A9: what is in memory is restored, and an event says what nobody looked for."""
    monkeypatch.setattr("holdfast_services.metadata.calls.registrations.ARCHIVE_KNOWN_S_MAX", 0.05)
    async with tier_over(database_url, kit, offers=False) as tier:
        await tier.commit(agents, await tier.launch(agents), 10)
        tier.service.archive = Shelf(UnavailableError("no route to the store"))
        await tier.launch(agents, b"second")
        tier.service.archive = silent = Shelf()
        silent.open.clear()
        await tier.launch(agents, b"third")

        assert 10 == (await tier.run()).decision.checkpoint.step
        events = await tier.service.read(lambda c: c.last_events(100))
    said = [row["message"] for row in events if row["kind"] == "object_store_not_asked"]
    assert ["did not list" in text or "no route" in text for text in said] == [True, True]


async def test_forgetting_memory_leaves_what_is_durable_and_its_lineage(database_url, agents, kit):
    """The arenas were erased: the next launch restores from the object store, and is not lost."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)
        await tier.commit(agents, seat, 20)
        await tier.commit(agents, seat, 25)
        await tier.service.write(workers.forget_memory)
        rows = await tier.service.read(lambda c: c.checkpoints(seat.run))
        assert [(10, True)] == [(row.id.step, row.stored) for row in rows]

        for agent in agents:
            agent.shards = []
            agent.incarnation += 1
        other = [
            changed_wish(kit.wish(rank, a.name, b"2"), launcher="M")
            for rank, a in enumerate(agents)
        ]
        for rank, (wish, agent) in enumerate(zip(other, agents, strict=True)):
            second = await tier.service.register(wish)
            agent.serve(second, rank)
        for agent in agents:
            await tier.service.report(agent.inventory())
        decision = (await tier.run()).decision
        assert 2 == second.generation
        assert key == decision.checkpoint


async def test_a_catalogue_of_the_first_version_is_upgraded_with_its_data(
    database_url, agents, kit
):
    """A run that was there before goes on: its rows stay, its attempt has no rule."""

    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        for agent in agents:
            for rank, owner in enumerate(agents):
                agent.hold(seat.run, 10, seat.generation, rank, owner=owner.name)
        for agent in agents:
            await service.report(agent.inventory())
    engine = make_engine(database_url, connections_max=1)
    config = Config()
    config.set_main_option("script_location", migrations.__path__[0])
    config.set_main_option("path_separator", "os")
    with write_transaction(engine) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    upgrade(engine)
    engine.dispose()

    async with tier_over(database_url, kit, offers=False) as tier:
        run = await tier.run()
        assert [10] == [row.id.step for row in run.checkpoints]
        assert not run.attempt.spec.persist.on
        second = await tier.launch(agents, b"second")
        number = (await tier.run()).decision.number
        for rank, agent in enumerate(agents):
            agent.serve(second, rank, ready_decision=number)
            await tier.service.report(agent.inventory())
        await tier.commit(agents, second, 20)

        assert [20] == [row.id.step for row in (await tier.run()).checkpoints if row.draining]
        assert isinstance(agents[0].ranks[0], RankStatus)
