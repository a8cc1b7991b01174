"""What holds a durable checkpoint and what expires it, over real databases and real races."""

import asyncio
import importlib.util
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from holdfast_services.metadata.loops.retention import RetentionLoop
from holdfast_services.metadata.storage.holds import Read
from holdfast_services.metadata.usecases import users, workers
from holdfast_services.metadata.usecases.users import At

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB, manifest, shelve = shelf.JOB, shelf.manifest, shelf.shelve
LAST_1 = Retention(last=1)


async def shelved(service, *steps):
    """Make the steps durable."""
    await shelve(service, *(manifest(step) for step in steps))


async def pin(service, at, note):
    return await service.change(lambda c: users.pin(c, at, note, service.limits))


async def remove(service, at, *, force):
    return await service.change(lambda c: users.remove(c, at, force=force))


async def begin_read(service, at, holder, ttl_s):
    number = secrets.token_hex(16)
    return await service.write(
        lambda c: users.begin_read(c, at, number=number, holder=holder, ttl_s=ttl_s)
    )


def test_a_policy_expires_what_it_does_not_keep_and_says_so(kit, database_url):
    """F87: the dry run and the deed say the same; expired ones wait for a worker."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20, 30)
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))
            dry = await service.read(lambda c: users.verdicts(c, JOB))
            before = await shelf.expired(service)
            done = await service.change(lambda c: users.expire(c, JOB))
            again = await service.change(lambda c: users.expire(c, JOB))
            items = await service.read(lambda c: workers.bucket_items(c, workers.Ages()))
            return dry, before, done, again, items, await shelf.kinds(service)

    dry, before, done, again, items, kinds = asyncio.run(main())

    assert dry == done
    assert [(30, True), (20, False), (10, False)] == [(v.id.step, v.keep) for v in done]
    assert [] == before
    assert ["expired already"] * 2 == [v.why for v in again if not v.keep]
    assert 2 == len([item for item in items if item.startswith("collect/")])
    assert 1 == kinds.count("checkpoint_expired")


def test_without_a_policy_nothing_expires(kit, database_url):
    """F87: also an age alone takes nothing."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20)
            await service.change(lambda c: users.expire(c, JOB))
            await service.change(lambda c: users.set_policy(c, JOB, Retention(age_s_min=0.001)))
            await service.change(lambda c: users.expire(c, JOB))
            return await shelf.expired(service), await RetentionLoop(service).sweep()

    assert ([], 0) == asyncio.run(main())


def test_the_sweep_looks_again_when_something_has_changed(kit, database_url):
    """The clock's own loop: a policy set, and then a newer durable checkpoint."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20)
            retention = RetentionLoop(service)
            counts = [await retention.sweep()]
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))
            counts += [await retention.sweep(), await retention.sweep()]
            await shelve(service, manifest(30))
            counts += [await retention.sweep(), await retention.sweep()]
            return counts

    assert [0, 1, 0, 1, 0] == asyncio.run(main())


def test_a_policy_goes_by_the_metric_of_the_notes(kit, database_url):
    """F87: best by a key of the user's metadata."""

    async def main():
        async with kit.running(database_url) as service:
            made = [manifest(s, notes={"loss": loss}) for s, loss in ((1, 0.9), (2, 0.1), (3, 0.5))]
            await shelve(service, *made, manifest(4))
            await service.change(
                lambda c: users.set_policy(c, JOB, Retention(best=1, metric="loss"))
            )
            await service.change(lambda c: users.expire(c, JOB))
            return await shelf.expired(service)

    assert [3, 1] == asyncio.run(main())


def test_what_was_left_behind_and_what_is_bad_neither_counts_nor_goes(kit, database_url):
    """F70, F87: last=1 is the newest that can be restored."""

    async def main():
        async with kit.running(database_url) as service:
            old = [manifest(step, 3, parent=(50, 1)) for step in (100, 200)]
            made = [*old, manifest(150, 4, parent=(100, 3))]
            await shelved(service, 50)
            await shelve(service, *made)
            bad = made[2].shards[0].id
            await service.write(lambda c: workers.scrubbed(c, bad.checkpoint, [bad]))
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))
            with_bad = await service.change(lambda c: users.expire(c, JOB))
            await service.write(lambda c: workers.scrubbed(c, bad.checkpoint, []))
            return with_bad, await service.change(lambda c: users.expire(c, JOB))

    with_bad, mended = asyncio.run(main())

    kept = {v.id.step: v.why for v in with_bad if v.keep}
    assert {200, 150, 100} == set(kept)
    assert kept[200] == "superseded"
    assert kept[150].startswith("bad")
    assert "newest that can be restored" in kept[100]
    assert [200, 150] == [v.id.step for v in mended if v.keep]


@pytest.mark.parametrize("hold", ["pin", "read"])
def test_a_hold_and_an_expiry_that_race_never_both_win(kit, database_url, hold):
    """F87, G11: two connections at once, many times; what is held is there, else it was refused."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, *range(1, 41))
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))

            async def held(step):
                at = At(JOB, step)
                one = pin(service, at, "") if hold == "pin" else begin_read(service, at, "me", 60.0)
                try:
                    await one
                except PreconditionError:
                    return False
                return True

            # Two holds before and two after the expiry is asked for: some win, some lose.
            steps = list(range(1, 40))
            holds = [asyncio.create_task(held(step)) for step in steps[:20]]
            expiry = asyncio.create_task(service.change(lambda c: users.expire(c, JOB)))
            holds += [asyncio.create_task(held(step)) for step in steps[20:]]
            won = {step for step, ok in zip(steps, await asyncio.gather(*holds), strict=True) if ok}
            await expiry
            return won, set(await shelf.expired(service))

    won, expired = asyncio.run(main())

    assert not won & expired
    assert won | expired == set(range(1, 40))


def test_the_expiry_statement_itself_asks_who_holds(kit, database_url):
    """Architecture 4.7: a caller that forgot to look deletes nothing that is held."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 1, 2, 3, 4)
            await pin(service, At(JOB, 1), "paper")
            await begin_read(service, At(JOB, 2), "export", 60.0)
            run = (await shelf.rows(service))[0].id.run

            def expire_all(catalogue):
                now_s = catalogue.now_s()
                keys = [CheckpointId(run, step, 1) for step in (1, 2, 3)]
                return [catalogue.expire(key, now_s) for key in (*keys, keys[2])]

            return await service.write(expire_all)

    assert [False, False, True, False] == asyncio.run(main())


def test_a_lease_that_ran_out_holds_nothing_and_cannot_be_renewed(kit, database_url):
    """G11: a reader that was silent too long is told, not lied to."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 1, 2)
            key = (await shelf.rows(service))[-1].id
            late = Read("0" * 32, key, "export", 0.0)
            await service.write(lambda c: c.put_read(replace(late, until_s=c.now_s() - 0.001)))
            with pytest.raises(PreconditionError, match="ran out"):
                await service.change(lambda c: users.renew_read(c, late.id, 60.0))
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))
            await service.change(lambda c: users.expire(c, JOB))
            return await shelf.expired(service)

    assert [1] == asyncio.run(main())


def test_a_lease_that_is_renewed_holds_until_it_is_ended(kit, database_url):
    """G11: neither policy nor force takes what an export reads."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 1, 2)
            await service.change(lambda c: users.set_policy(c, JOB, LAST_1))
            lease = await begin_read(service, At(JOB, 1), "export", 30.0)
            longer = await service.change(lambda c: users.renew_read(c, lease.id, 60.0))
            held = await service.change(lambda c: users.expire(c, JOB))
            with pytest.raises(PreconditionError, match="read by export"):
                await remove(service, At(JOB, 1), force=True)
            await service.change(lambda c: users.end_read(c, lease.id))
            await service.change(lambda c: users.end_read(c, lease.id))
            with pytest.raises(NotFoundError):
                await service.change(lambda c: users.renew_read(c, lease.id, 60.0))
            return lease, longer, held, await service.change(lambda c: users.expire(c, JOB))

    lease, longer, held, after = asyncio.run(main())

    assert longer.until_s > lease.until_s
    assert [True, True] == [v.keep for v in held]
    assert "read by export" == held[1].why
    assert [True, False] == [v.keep for v in after]


def test_readers_are_bounded(kit, database_url, monkeypatch):
    monkeypatch.setattr(users, "READS_PER_RUN_MAX", 2)

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 1)
            for _ in range(2):
                await begin_read(service, At(JOB, 1), "me", 60.0)
            with pytest.raises(ExhaustedError):
                await begin_read(service, At(JOB, 1), "me", 60.0)

    asyncio.run(main())


def test_what_a_restore_names_cannot_be_expired(kit, database_url, agents):
    """Interleaving 7: the decision's pin wins over force, until every rank has loaded."""

    async def main():
        async with kit.running(database_url, replace(kit.LIMITS, object_tier=True)) as service:
            await shelved(service, 10, 20)
            seat = await kit.launch(service, agents)
            view = await service.report(agents[0].inventory())
            decision = next(run for run in view.runs if run.run == seat.run).decision
            with pytest.raises(PreconditionError, match="being restored"):
                await remove(service, At(JOB, 20), force=True)
            expiries = await service.write(lambda c: c.expire(decision.checkpoint, c.now_s()))
            return decision, expiries

    decision, expired = asyncio.run(main())

    assert (DecisionState.PROPOSED, 20) == (decision.state, decision.checkpoint.step)
    assert not expired


def test_the_last_one_that_can_be_restored_goes_by_force_alone(kit, database_url):
    """G11: and a pinned one too."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20)
            await pin(service, At(JOB, 10), "paper")
            refusals = []
            for step in (10, 20):
                with pytest.raises(PreconditionError) as refused:
                    await remove(service, At(JOB, step), force=False)
                refusals.append(refused.value.message)
            await remove(service, At(JOB, 20), force=True)
            await remove(service, At(JOB, 20), force=False)  # a repeat is harmless
            await remove(service, At(JOB, 10), force=True)
            return refusals, await shelf.rows(service)

    refusals, rows = asyncio.run(main())

    assert "is pinned" in refusals[0]
    assert "newest that can be restored" in refusals[1]
    assert [True, True] == [item.row.expired for item in rows]
    assert [None, None] == [item.pin for item in rows]


def test_what_has_expired_can_neither_be_pinned_nor_read(kit, database_url):
    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20)
            await remove(service, At(JOB, 10), force=False)
            for refused in (
                pin(service, At(JOB, 10), ""),
                begin_read(service, At(JOB, 10), "me", 60.0),
            ):
                with pytest.raises(PreconditionError, match="expired"):
                    await refused

    asyncio.run(main())


def test_of_a_step_that_is_there_twice_the_one_that_counts_is_meant(kit, database_url):
    """Without a generation: the one that was not left behind."""

    async def main():
        async with kit.running(database_url) as service:
            await shelve(service, manifest(10, 1), manifest(20, 1), manifest(20, 2, parent=(10, 1)))
            meant = await pin(service, At(JOB, 20), "")
            other = await pin(service, At(JOB, 20, 1), "")
            with pytest.raises(NotFoundError):
                await pin(service, At(JOB, 20, 3), "")
            return meant.id.generation, other.id.generation

    assert (2, 1) == asyncio.run(main())


def test_a_pin_brings_a_step_in_memory_to_the_object_store(kit, database_url, agents):
    """F87: or says why it cannot: no store, something else on its way, nothing left of it. By
    force it goes no further: a drain that cannot end has a way out."""
    tiered = replace(kit.LIMITS, object_tier=True)

    async def main():
        async with kit.running(database_url, tiered) as service:
            seat = await kit.launch(service, agents)
            for step in (1, 2):
                for rank, agent in enumerate(agents):
                    agent.hold(seat.run, step, seat.generation, rank)
                    agent.serve(seat, rank, loaded=True)
                for agent in agents:
                    await service.report(agent.inventory())
            service.limits = kit.LIMITS
            with pytest.raises(PreconditionError, match="no object store"):
                await pin(service, At(JOB, 2), "")
            service.limits = tiered
            pinned = await pin(service, At(JOB, 2), "paper")
            with pytest.raises(PreconditionError, match="is being uploaded: try again later"):
                await pin(service, At(JOB, 1), "")
            with pytest.raises(PreconditionError, match="being uploaded"):
                await remove(service, At(JOB, 2), force=False)
            with pytest.raises(PreconditionError, match="in memory"):
                await remove(service, At(JOB, 1), force=True)
            items = await service.read(workers.drain_items)
            stopped = await remove(service, At(JOB, 2), force=True)
            with pytest.raises(NotFoundError):
                await service.read(lambda c: workers.plan(c, items[0], workers.Ages()))
            return pinned, items, stopped, await shelf.kinds(service)

    pinned, items, stopped, kinds = asyncio.run(main())

    assert ("paper", 0, True) == (pinned.pin, pinned.stored_shards, pinned.row.draining)
    assert 2 == len(items)
    assert (None, False, None) == (stopped.pin, stopped.row.draining, stopped.row.durable_at_s)
    assert "persist_lost" in kinds


def test_unpinning_what_is_not_pinned_is_not_found(kit, database_url):
    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10)
            await pin(service, At(JOB, 10), "a")
            await pin(service, At(JOB, 10), "b")
            note = (await shelf.rows(service))[0].pin
            await service.change(lambda c: users.unpin(c, At(JOB, 10)))
            with pytest.raises(NotFoundError):
                await service.change(lambda c: users.unpin(c, At(JOB, 10)))
            return note

    assert "b" == asyncio.run(main())


def test_a_scrub_that_is_asked_for_is_due_until_it_was_done(kit, database_url):
    """G20."""

    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10, 20)
            count = await service.change(lambda c: users.scrub(c, JOB))
            due = await service.read(lambda c: workers.bucket_items(c, workers.Ages()))
            key = (await shelf.rows(service))[0].id
            await service.write(lambda c: workers.scrubbed(c, key, []))
            left = await service.read(lambda c: workers.bucket_items(c, workers.Ages()))
            return count, due, left

    count, due, left = asyncio.run(main())

    assert (2, 2, 1) == (count, len(due), len(left))
    assert all(item.startswith("scrub/") for item in due)


def test_jobs_that_nobody_knows_are_not_found(kit, database_url):
    async def main():
        async with kit.running(database_url) as service:
            calls = [
                service.read(lambda c: users.verdicts(c, "x")),
                service.change(lambda c: users.expire(c, "x")),
                service.read(lambda c: users.policy(c, "x")),
                service.change(lambda c: users.set_policy(c, "x", LAST_1)),
                pin(service, At("x", 1), ""),
                service.change(lambda c: users.scrub(c, "x")),
            ]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, CheckpointError) for one in found)
            return [type(one) for one in found]

    assert [NotFoundError] * 6 == asyncio.run(main())


def test_a_policy_out_of_bounds_is_refused(kit, database_url):
    async def main():
        async with kit.running(database_url) as service:
            await shelved(service, 10)
            with pytest.raises(InvalidRequestError):
                await service.change(
                    lambda c: users.set_policy(c, JOB, Retention(last=1, spaced_s=0.01))
                )

    asyncio.run(main())
