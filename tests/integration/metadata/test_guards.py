"""The statements ask again: whoever forgets a rule cannot break it in the database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.protection import NO_COPIES
from holdfast.errors import ConflictError, NotFoundError
from holdfast_services.kit.db import write_transaction
from holdfast_services.metadata.domain.model import Checkpoint, Stored
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.storage.checkpoints import DURABLE_ROWS_IN_RUN_MAX
from holdfast_services.metadata.storage.nodes import NODE_SILENT_S_MAX
from holdfast_services.metadata.usecases.workers import durable

LEASE_S = 30.0  # of the nodes, as the kit's limits have it


def row(key, **levels):
    return Checkpoint(
        id=key, world_size=2, plan_hash="plan", length_bytes=200, local_at_s=1.0, **levels
    )


@pytest.mark.parametrize(
    ("levels", "pinned", "gone"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"durable_at_s": 2.0}, False, False),
        ({"drain_at_s": 2.0}, False, False),
    ],
    ids=["nothing", "a user's pin", "durable", "draining"],
)
async def test_what_something_holds_is_not_forgotten(database_url, kit, levels, pinned, gone):
    """4.7."""
    key = CheckpointId("r1", 10, 1)

    def fill(catalogue):
        catalogue.add_job(kit.JOB, key.run, 1.0)
        catalogue.put_checkpoints([row(key, **levels)])
        if pinned:
            catalogue.put_pin(key, "", 1.0)

    async with kit.running(database_url) as service:
        await service.write(fill)

        assert gone == await service.write(lambda c: c.forget_checkpoint(key))
        assert gone == ((await service.read(lambda c: c.checkpoint(key))) is None)


async def test_a_level_and_notes_are_added_and_never_taken_away(database_url, kit):
    """P1: who knows less may write later."""
    key = CheckpointId("r1", 10, 1)
    whole = row(key, replicated_at_s=2.0, copied_at_s=2.0, durable_at_s=3.0, notes='{"loss":1}')
    later = row(key, replicated_at_s=9.0, notes='{"loss":2}')
    async with kit.running(database_url) as service:
        await service.write(lambda c: c.add_job(kit.JOB, key.run, 1.0))
        for written in (whole, row(key), later):
            await service.write(lambda c, item=written: c.put_checkpoints([item]))

            assert whole == await service.read(lambda c: c.checkpoint(key))


async def test_a_generation_never_goes_back(database_url, agents, kit):
    """M1: it was written without the job's lock; the transaction is redone."""
    async with kit.running(database_url) as service:
        await kit.launch(service, agents)
        seat = await kit.launch(service, agents, b"second")
        run = await service.read(lambda c: c.load_run(seat.run))
        older = replace(run, generation=run.generation - 1, attempt=None)

        with pytest.raises(ConflictError, match="changed under its lock"):
            await service.write(lambda c: c.save_run(run, older))

        assert run == await service.read(lambda c: c.load_run(seat.run))


async def test_only_nodes_whose_lease_is_over_are_lost(database_url, agents, kit):
    async with kit.running(database_url) as service:
        for agent in agents:
            await service.report(agent.inventory())
        now_s = await service.read(lambda c: c.now_s())

        assert [] == await service.write(lambda c: c.mark_lost(now_s))
        later_s = now_s + 2 * LEASE_S
        assert ["a", "b"] == await service.write(lambda c: c.mark_lost(later_s))


async def test_only_nodes_that_are_silent_for_long_are_forgotten(database_url, agents, kit):
    async with kit.running(database_url) as service:
        await service.report(agents[0].inventory())
        now_s = await service.read(lambda c: c.now_s())
        for later_s, known in (
            (NODE_SILENT_S_MAX, {"a"}),
            (NODE_SILENT_S_MAX + 2 * LEASE_S, set()),
        ):
            await service.write(lambda c, at_s=now_s + later_s: c.forget_nodes(at_s))

            assert known == (await service.read(lambda c: c.nodes())).keys()


async def test_a_pulse_is_moved_from_where_it_was_seen(database_url, kit):
    """Of several processes one succeeds."""
    async with kit.running(database_url) as service:
        seen_s = await service.read(lambda c: c.pulse_s())

        assert await service.write(lambda c: c.beat(seen_s, seen_s + 1.0))
        assert not await service.write(lambda c: c.beat(seen_s, seen_s + 2.0))
        assert seen_s + 1.0 == await service.read(lambda c: c.pulse_s())


@pytest.mark.parametrize("spoilt", ["bad", "expired", "tried in vain"])
async def test_what_cannot_be_restored_hides_nothing_that_can(database_url, agents, kit, spoilt):
    """P5; defect A5: a run is read with few of its durable rows; the newest are no use here."""

    def fill(catalogue, run):
        keys = [CheckpointId(run, step, 1) for step in range(1, DURABLE_ROWS_IN_RUN_MAX + 2)]
        for key in keys:
            agents[0].hold(run, key.step, key.generation, 0)
            lies = Stored(checkpoint=key, shards=(agents[0].shards[-1].shard,))
            catalogue.put_checkpoints([row(key, durable_at_s=2.0)])
            catalogue.put_object(lies, manifest_digest=b"", verified_at_s=None)
        good, *useless = keys
        for key, shard in zip(useless, agents[0].shards[1:], strict=True):
            if spoilt == "bad":
                catalogue.set_bad(key, [shard.shard.id])
            elif spoilt == "expired":
                assert catalogue.expire(key, 3.0)
        if spoilt == "tried in vain":
            before = catalogue.load_run(run)
            number = before.decision.number + 1
            next_one = replace(before.decision, number=number, state=DecisionState.PENDING)
            after = replace(before, decision=next_one, rejected=tuple(useless))
            catalogue.save_run(before, after)
        return good

    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        good = await service.write(lambda c: fill(c, seat.run))
        run = await service.read(lambda c: c.load_run(seat.run))

    assert good in {item.id for item in run.checkpoints}
    assert run.usable(good)


async def test_what_a_confirmed_restore_found_in_vain_is_kept_and_stays_known(
    database_url, agents, kit
):
    """P5: the next attempt takes an older step; without one the job is lost, never new."""

    def fill(catalogue, run):
        key = CheckpointId(run, 8, 1)
        agents[0].hold(run, key.step, key.generation, 0)
        lies = Stored(checkpoint=key, shards=(agents[0].shards[-1].shard,))
        catalogue.put_checkpoints([row(key, durable_at_s=2.0)])
        catalogue.put_object(lies, manifest_digest=b"", verified_at_s=None)
        before = catalogue.load_run(run)
        assert before.decision.state is DecisionState.CONFIRMED
        catalogue.save_run(before, replace(before, rejected=(key,)))
        return key

    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        key = await service.write(lambda c: fill(c, seat.run))
        run = await service.read(lambda c: c.load_run(seat.run))

    assert (key,) == run.rejected
    assert key in {item.id for item in run.checkpoints}


async def test_whatever_changes_of_a_run_is_read_again(database_url, agents, kit):
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        run = await service.read(lambda c: c.load_run(seat.run))
        until_s = run.attempt.lease_until_s + 5.0
        attempt = replace(run.attempt, lease_until_s=until_s, allowed=NO_COPIES)
        first, *others = run.ranks
        for facts in ({"live": not first.live}, {"node": "z"}, {"ready_decision": 9}):
            first = replace(first, **facts)
            after = replace(run, attempt=attempt, ranks=(first, *others))
            await service.write(lambda c, old=run, new=after: c.save_run(old, new))
            run = await service.read(lambda c: c.load_run(seat.run))

            assert after == run


async def test_a_job_is_active_by_its_newest_attempt_or_while_it_decides(database_url, agents, kit):
    """What no agent reports of any more is watched by the clock alone, and nothing else is."""
    async with kit.running(database_url) as service:
        await kit.launch(service, agents)
        seat = await kit.launch(service, agents, b"second")
        run = await service.read(lambda c: c.load_run(seat.run))
        end_s = run.attempt.lease_until_s
        over = replace(run, attempt=replace(run.attempt, lease_until_s=end_s - 1000.0))
        await service.write(lambda c: c.save_run(run, over))

        assert [] == await service.read(lambda c: c.active_jobs(end_s - 500.0))
        number = run.decision.number + 1
        open_one = replace(run.decision, number=number, state=DecisionState.PENDING)
        await service.write(lambda c: c.save_run(over, replace(over, decision=open_one)))
        assert [kit.JOB] == await service.read(lambda c: c.active_jobs(end_s - 500.0))


async def test_a_worker_takes_the_pulse_before_the_job_like_everybody(database_url, kit):
    """The one order of locks: else its report and a beat wait for each other."""
    taken = []

    class Watched(Catalogue):
        def pulse(self):
            taken.append("pulse")
            return super().pulse()

        def lock_job(self, job):
            taken.append("job")
            return super().lock_job(job)

    async with kit.running(database_url) as service:
        seat = await service.register(kit.wish(0, "a"))
        with (
            pytest.raises(NotFoundError),
            write_transaction(service._engine) as connection,
        ):
            durable(
                Watched(connection, DecodeCache()),
                CheckpointId(seat.run, 1, 1),
                bytes(16),
                service.limits,
            )

    assert ["pulse", "job"] == list(dict.fromkeys(taken))
