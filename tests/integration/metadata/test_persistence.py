"""A drain from commit to durable, and what is kept: said once, said twice, said too late."""

from dataclasses import replace

import pytest
from sqlalchemy import text
from tests.integration.metadata.tier import DIGEST, LIMITS, expire, tier_over
from tests.said import changed_status, changed_wish

from holdfast.core.decision import DecisionState, Start
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.reports import StepNote
from holdfast.errors import (
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.v1 import common_pb2 as common
from holdfast_services.metadata.loops.offers import ORPHANS
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.usecases import workers
from holdfast_services.metadata.usecases.agents import tick
from holdfast_services.metadata.usecases.workers import Ages

# What version 0.1.0 first wrote for two shards of checkpoint (r0, 10, 1) of gpt/small.
OLD_BODY = bytes.fromhex(
    "0a080a027230100a180112096770742f736d616c6c1a310a080a027230100a180112096770742f736d61"
    "6c6c18022204706c616e28643210000000000000000000000000000000001a330a0a0a027230100a1801"
    "200112096770742f736d616c6c18022204706c616e2864321001010101010101010101010101010101"
)


async def test_a_drain_from_commit_to_durable(database_url, agents, kit):
    """G10: offered by itself, shards, then the manifest; then it is durable and not kept for it."""
    async with tier_over(database_url, kit) as tier:
        seat = await tier.launch(agents)
        agents[0].ranks = tuple(
            changed_status(s, notes=(StepNote(step=10, json='{"loss":1}'),))
            for s in agents[0].ranks
        )
        view = await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        assert {key} == {shard.checkpoint for shard in view.drained}
        assert view.committed[0].draining

        items = [await tier.do_next() for _ in range(3)]
        assert [f"shard/{seat.run}/10/1/0/0", f"shard/{seat.run}/10/1/1/0"] == sorted(items[:2])
        assert f"manifest/{seat.run}/10/1" == items[2]

        row = await tier.row(key)
        assert row.stored
        assert not row.draining
        assert '{"loss":1}' == row.notes
        view = (await tier.service.watch("a", "", 0)).runs[0]
        assert () == view.drained
        assert view.committed[0].durable
        stored = await tier.service.read(lambda c: c.stored(key))
        assert [0, 1] == [shard.id.rank for shard in stored.shards]
        assert "checkpoint_durable" in await tier.kinds()
        with pytest.raises(NotFoundError):
            await tier.plan(items[2])


async def test_what_is_said_twice_or_after_a_lost_answer_changes_nothing(database_url, agents, kit):
    """Of a shard while it drains and after, of a manifest, a scrub, a collection."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        first, second = await tier.service.read(lambda c: c.drained_shards(key))

        assert [1, 1] == [await tier.stored(first) for _ in range(2)]
        assert [0, 0] == [await tier.stored(second) for _ in range(2)]
        for _ in range(2):
            await tier.durable(key)
            assert 0 == await tier.stored(first)
            await tier.scrubbed(key)
        before = await tier.row(key)
        assert 1 == (await tier.kinds()).count("checkpoint_durable")
        await expire(tier, key)
        for _ in range(2):
            await tier.collected(key)

        assert before.durable_at_s is not None
        assert 1 == (await tier.kinds()).count("checkpoint_collected")


async def test_durable_before_all_shards_is_refused_and_names_them(database_url, agents, kit):
    """P1."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        with pytest.raises(NotReadyError, match="2 shards"):
            await tier.durable(key)
        shards = await tier.service.read(lambda c: c.drained_shards(key))
        await tier.stored(shards[0])
        with pytest.raises(NotReadyError, match=r"1 shards.*/10/1/1/0"):
            await tier.durable(key)
        with pytest.raises(NotFoundError):
            await tier.plan(f"manifest/{seat.run}/10/1")

        assert (await tier.row(key)).durable_at_s is None


async def test_what_is_not_of_the_checkpoint_is_refused(database_url, agents, kit):
    """P1, P9: another digest, another manifest, a checkpoint that nobody knows, nonsense."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        shard, _ = await tier.service.read(lambda c: c.drained_shards(key))
        with pytest.raises(PreconditionError):
            await tier.stored(replace(shard, root_digest=b"x" * 16))
        with pytest.raises(PreconditionError):
            await tier.stored(replace(shard, id=replace(shard.id, rank=9)))
        with pytest.raises(NotFoundError):
            await tier.stored(replace(shard, id=replace(shard.id, run="nobody")))
        with pytest.raises(NotFoundError):
            await tier.durable(replace(key, step=99))
        with pytest.raises(InvalidRequestError):
            await tier.durable(key, b"short")
        with pytest.raises(InvalidRequestError):
            await tier.plan("burn/everything")
        with pytest.raises(NotFoundError):
            await tier.plan("manifest/nobody/1/1")
        await tier.drained(key)
        await tier.durable(key)
        with pytest.raises(PreconditionError, match="another manifest"):
            await tier.durable(key, b"o" * 16)
        with pytest.raises(PreconditionError, match="expired"):
            await tier.collected(key)
        with pytest.raises(InvalidRequestError):
            await tier.scrubbed(key, replace(shard.id, rank=9))
        with pytest.raises(NotFoundError):
            await tier.scrubbed(replace(key, step=11))


async def test_a_worker_of_an_older_generation_that_wakes_up_is_refused(database_url, agents, kit):
    """P2, G12: its step was left behind while it slept; a newer manifest is there meanwhile."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 5)
        await tier.commit(agents, seat, 10)
        old = CheckpointId(seat.run, 10, 1)
        shards = await tier.service.read(lambda c: c.drained_shards(old))
        await tier.stored(shards[0])
        for agent in agents:  # the newest step is gone from one rank
            agent.shards = [h for h in agent.shards if h.shard.id != shards[1].id]
        second = await tier.launch(agents, b"second")
        number = (await tier.run()).decision.number
        for rank, agent in enumerate(agents):
            agent.serve(second, rank, ready_decision=number)
            await tier.service.report(agent.inventory())
        assert 5 == (await tier.run()).decision.checkpoint.step
        await tier.commit(agents, second, 10)
        new = CheckpointId(seat.run, 10, 2)
        await tier.drained(new)
        await tier.durable(new)

        with pytest.raises(StaleGenerationError):
            await tier.stored(shards[1])
        with pytest.raises(StaleGenerationError):
            await tier.durable(old)
        with pytest.raises(NotFoundError):
            await tier.plan(f"manifest/{seat.run}/10/1")
        assert (await tier.row(old)).durable_at_s is None
        assert (await tier.row(new)).stored
        assert "persist_lost" in await tier.kinds()


async def test_a_drain_of_a_dead_attempt_that_was_not_left_behind_ends_well(
    database_url, agents, kit
):
    """G12: fencing is about what was superseded, not about age."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.launch(agents, b"second")
        await tier.drained(key)
        await tier.durable(key)

        assert (await tier.row(key)).stored


async def test_what_a_start_leaves_behind_in_the_transaction_that_makes_it_durable_is_durable(
    database_url, agents, kit
):
    """M6: the claim comes first; what was due to be decided comes after it."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        for rank, agent in enumerate(agents):
            wish = kit.wish(rank, agent.name, b"second")
            await tier.service.register(changed_wish(wish, start=Start(name="over", fresh=True)))
        assert (await tier.run()).deciding, "until both agents have reported"
        waited = replace(LIMITS, decide_wait_s=0.0)

        await tier.service.write(lambda c: workers.durable(c, key, DIGEST, waited))

        assert (await tier.run()).superseded(key)
        assert (await tier.row(key)).stored
        assert "persist_lost" not in await tier.kinds()


async def test_what_becomes_durable_counts_for_the_decision_of_that_transaction(
    database_url, agents, kit
):
    """P5: its memory is gone, and the wait of a restore is over as the claim comes: not lost."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        for rank, agent in enumerate(agents):
            agent.shards = []
            await tier.service.report(agent.inventory())
            await tier.service.register(kit.wish(rank, agent.name, b"second"))
        assert (await tier.run()).decision.state is DecisionState.PENDING
        waited = replace(LIMITS, decide_wait_s=0.0)

        await tier.service.write(lambda c: workers.durable(c, key, DIGEST, waited))

        decision = (await tier.run()).decision
        assert (DecisionState.PROPOSED, key) == (decision.state, decision.checkpoint)


async def test_a_shard_whose_holders_are_away_is_to_be_tried_later(database_url, agents, kit):
    """Not lost: their last word was that they hold it."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        for agent in agents:
            agent.leaving = True
            await tier.service.report(agent.inventory())

        with pytest.raises(UnavailableError):
            await tier.plan(f"shard/{seat.run}/10/1/0/0")


async def test_a_bad_shard_is_offered_planned_and_written_again(database_url, agents, kit):
    """G20: repair from another tier."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)
        bad = ShardId(seat.run, 10, 1, 1)
        item = f"shard/{bad.key}"
        with pytest.raises(NotFoundError):
            await tier.plan(item)
        await tier.scrubbed(key, bad)
        await tier.scrubbed(key, bad)
        assert 1 == (await tier.kinds()).count("checkpoint_bad")
        assert not (await tier.row(key)).stored
        assert [item] == await tier.service.read(lambda c: workers.bucket_items(c, Ages()))

        plan = await tier.plan(item)
        assert plan.repair
        await tier.stored(plan.shard)
        assert (await tier.row(key)).stored
        assert [] == await tier.service.read(lambda c: workers.bucket_items(c, Ages()))


async def test_what_is_kept_is_scrubbed_when_asked_or_old_and_collected_when_expired(
    database_url, agents, kit
):
    """G11, G20."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)

        async def due(scrub_s=0.0):
            ages = Ages(scrub_s=scrub_s)
            return await tier.service.read(lambda c: workers.bucket_items(c, ages))

        assert [] == await due() == await due(3600.0)
        await tier.service.write(lambda c: c.ask_scrub(key))
        assert [f"scrub/{seat.run}/10/1"] == await due()
        assert 2 == len((await tier.plan(f"scrub/{seat.run}/10/1")).shards)
        await tier.scrubbed(key)
        assert [] == await due()
        assert [f"scrub/{seat.run}/10/1"] == await due(1e-9)

        await expire(tier, key)
        assert [f"collect/{seat.run}/10/1"] == await due(1e-9)
        assert key == (await tier.plan(f"collect/{seat.run}/10/1")).checkpoint
        await tier.collected(key)
        assert (await tier.row(key)).durable_at_s is None, "it is in memory still"
        assert [] == await due()


async def test_a_checkpoint_is_relied_on_from_durable_to_expired(database_url, agents, kit):
    """G11: what the sweep and the scrub ask before they delete, or write a manifest again."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        answers = [await tier.is_durable(replace(key, step=5)), await tier.is_durable(key)]
        await tier.drained(key)
        await tier.durable(key)
        answers.append(await tier.is_durable(key))
        await tier.scrubbed(key, ShardId(seat.run, 10, 1, 0))
        answers.append(await tier.is_durable(key))
        await expire(tier, key)

        assert [False, False, True, True] == answers
        assert not await tier.is_durable(key)


async def test_a_row_that_an_earlier_version_wrote_is_read(database_url, agents, kit):
    """Its body is the plan of the whole checkpoint, of which the shards are one field."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)

        def age(catalogue):
            catalogue._db.execute(text("UPDATE objects SET body = :body"), {"body": OLD_BODY})
            return Catalogue(catalogue._db, DecodeCache()).stored(key)

        stored = await tier.service.write(age)

        found = [(shard.id, shard.job, shard.root_digest) for shard in stored.shards]
        ids = [ShardId("r0", 10, 1, rank) for rank in (0, 1)]
        assert [(one, kit.JOB, bytes([one.rank]) * 16) for one in ids] == found


async def test_what_was_collected_and_is_in_no_memory_is_forgotten(database_url, agents, kit):
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, 1)
        await tier.drained(key)
        await tier.durable(key)
        for agent in agents:
            agent.shards = []
            await tier.service.report(agent.inventory())
        await expire(tier, key)
        await tier.collected(key)

        assert await tier.row(key) is None


async def test_the_plan_for_orphans_spares_what_is_on_its_way(database_url, agents, kit):
    """G11: by the database's clock."""
    async with tier_over(database_url, kit, offers=False, ages=Ages(orphan_s=60.0)) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        plan = await tier.plan(ORPHANS)
        now_s = await tier.service.read(lambda c: c.now_s())

        assert (CheckpointId(seat.run, 10, 1),) == plan.draining
        assert now_s - 65 < plan.before_s <= now_s - 60


async def test_a_handshake_says_where_rest_is(database_url, kit):
    async with tier_over(database_url, kit, offers=False) as tier:
        assert "http://r" == (await tier.call("Handshake", common.HandshakeRequest())).rest_url


async def test_what_is_being_deleted_while_it_is_read_back_is_not_called_bad(
    database_url, agents, kit
):
    """A scrub that began before the expiry finds objects gone: no alarm."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        await tier.drained(key)
        await tier.durable(key)
        await expire(tier, key)
        await tier.scrubbed(key, ShardId(seat.run, 10, 1, 0))

        assert "checkpoint_bad" not in await tier.kinds()
        assert not (await tier.row(key)).bad


async def test_a_shard_on_its_way_that_is_found_missing_goes_again(database_url, agents, kit):
    """P1: reported, then not there when the manifest was due; nobody else would send it again."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)
        key = CheckpointId(seat.run, 10, seat.generation)
        await tier.drained(key)
        lost, _ = await tier.service.read(lambda c: c.drained_shards(key))
        for _ in range(2):
            await tier.scrubbed(key, lost.id)

        items = await tier.service.read(workers.drain_items)
        assert [f"shard/{lost.id.key}"] == items
        with pytest.raises(NotFoundError):
            await tier.plan(f"manifest/{seat.run}/10/1")
        with pytest.raises(NotReadyError):
            await tier.durable(key)
        assert not (await tier.plan(items[0])).repair
        assert 1 == (await tier.kinds()).count("checkpoint_bad")
        assert 0 == await tier.stored(lost)
        await tier.durable(key)
        assert (await tier.row(key)).stored


async def test_a_drain_of_a_finished_run_is_given_up_when_its_holders_stay_away(
    database_url, agents, kit
):
    """Nobody reports for it any more: the clock alone ends it, long after the lease has."""
    async with tier_over(database_url, kit, offers=False) as tier:
        seat = await tier.launch(agents)
        await tier.commit(agents, seat, 10)

        def long_ago(catalogue):
            for sql in (
                "UPDATE attempts SET lease_until_s = 1",
                "UPDATE nodes SET lease_until_s = 1, reported_at_s = 1, lost = TRUE",
            ):
                catalogue._db.execute(text(sql))

        await tier.service.write(long_ago)
        await tier.service.write(lambda c: tick(c, LIMITS))

        assert [] == await tier.service.read(lambda c: c.draining())
        assert "persist_lost" in await tier.kinds()
