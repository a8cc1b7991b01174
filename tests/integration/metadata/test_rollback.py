"""A user rolls a job back: the next start restores that step, and nothing later by itself."""

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.origin import USER_LENGTH_MAX, Origin, Tree
from holdfast.errors import (
    NotFoundError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.format import rollback as records
from holdfast.format.keys import rollback_key
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.calls.rollbacks import roll_back
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.rollbacks import Wish
from holdfast_services.metadata.usecases.users import At

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB, manifest, put = shelf.JOB, shelf.manifest, shelf.put
RUN = first_run(JOB)


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'catalogue.db'}"


def over(kit, url, store=None):
    """A service; with a store it has an archive."""
    return _Over(kit, url, store)


class _Over:
    def __init__(self, kit, url, store):
        limits = replace(kit.LIMITS, object_tier=store is not None)
        self._running, self._store = kit.running(url, limits), store

    async def __aenter__(self):
        self.service = await self._running.__aenter__()
        self.archive = BucketArchive(self.service, self._store) if self._store else None
        self.service.archive = self.archive
        return self

    async def __aexit__(self, *failure):
        return await self._running.__aexit__(*failure)

    async def roll_back(self, step, generation=None, **wish):
        at = At(JOB, step, generation)
        return await roll_back(self.service, self.archive, Wish(at=at, **wish))

    async def end(self, agents):
        """All ranks' processes have gone, so the lease of their attempt ends."""
        for agent in agents:
            agent.ranks = tuple(replace(rank, live=False) for rank in agent.ranks)
            await self.service.report(agent.inventory())

    async def chosen(self, kit, agents, nonce):
        """What a new attempt is told to restore: step and attempt."""
        seat = await kit.launch(self.service, agents, nonce, launcher=f"of {nonce}")
        view = await self.service.report(agents[0].inventory())
        decision = next(run for run in view.runs if run.run == seat.run).decision
        return decision and decision.checkpoint and key_of(decision.checkpoint)


def key_of(key):
    return (key.step, key.generation)


def run_async(main):
    return asyncio.run(main())


HISTORY = (manifest(100), manifest(200), manifest(300))


def test_the_next_start_restores_the_step_and_forward_again_what_was_left(
    kit, agents, database_url
):
    """G19: later steps are kept, shown as left behind, and another rollback goes forward."""
    store = MemoryStore()
    put(store, *HISTORY)

    async def main():
        async with over(kit, database_url, store) as there:
            await there.archive.adopt(JOB)
            back = await there.roll_back(100, holder="ada@box", reason="it diverged")
            first = await there.chosen(kit, agents, b"second")
            await there.end(agents)
            forward = await there.roll_back(300)
            rows = await shelf.rows(there.service)
            second = await there.chosen(kit, agents, b"third")
            return back, first, forward, rows, second, await shelf.kinds(there.service)

    back, first, forward, rows, second, kinds = run_async(main)

    assert [(300, 1), (200, 1)] == [key_of(key) for key in back.left]
    assert (100, 1) == first
    assert ((300, 1), ()) == (key_of(forward.rollback.to), forward.left)
    assert all(item.row.stored for item in rows), "nothing is deleted"
    assert (300, 1) == second
    assert 2 == kinds.count("job_rolled_back")


def test_what_trains_is_rolled_back_by_force_alone_and_saves_nothing_afterwards(
    kit, agents, sqlite_url
):
    """P2: the attempt that trained is fenced by the rollback's generation."""

    async def main():
        async with over(kit, sqlite_url) as there:
            await shelf.shelve(there.service, *HISTORY)
            seat = await kit.launch(there.service, agents)
            with pytest.raises(PreconditionError) as refused:
                await there.roll_back(200)
            done = await there.roll_back(200, force=True)
            with pytest.raises(StaleGenerationError):
                await there.service.register(kit.wish(0, "a"))
            chosen = await there.chosen(kit, agents, b"second")
            return seat, refused.value, done, chosen

    seat, refused, done, chosen = run_async(main)

    assert "is training: attempt 2, started by holder of L" in refused.message
    assert "--force" in refused.message
    assert seat.generation < done.rollback.generation
    assert chosen is None, "without an object store the service has nothing of step 200"


def test_a_repeat_changes_nothing_and_a_late_one_is_refused(kit, agents, sqlite_url):
    """Late and doubled messages: the same wish twice, and once more after others went on."""
    store = MemoryStore()
    put(store, *HISTORY)

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
            once = await there.roll_back(100, attempt=1, holder="ada@box")
            again = await there.roll_back(100, attempt=1, holder="ada@box")
            with pytest.raises(PreconditionError) as other:
                await there.roll_back(200, attempt=1, holder="bob@box")
            await there.chosen(kit, agents, b"second")
            await there.end(agents)
            with pytest.raises(PreconditionError) as late:
                await there.roll_back(100, attempt=1)
            return once, again, other.value, late.value, await shelf.kinds(there.service)

    once, again, other, late, kinds = run_async(main)

    assert (once.rollback.generation, True) == (again.rollback.generation, again.repeated)
    assert "ada@box has rolled it back to step 100 since" in other.message
    assert "it was started since" in late.message
    assert 1 == kinds.count("job_rolled_back")


@pytest.mark.parametrize(
    ("to", "why", "error"),
    [
        ((150, None), "has no checkpoint of step 150", NotFoundError),
        ((200, 7), "by attempt 7", NotFoundError),
        ((300, None), "has expired and is being deleted", PreconditionError),
        ((400, None), "not whole in memory, nor in the object store", PreconditionError),
    ],
)
def test_what_cannot_be_restored_is_refused_by_name(kit, agents, sqlite_url, to, why, error):
    async def main():
        async with over(kit, sqlite_url) as there:
            await shelf.shelve(there.service, *HISTORY)
            await there.service.write(lambda c: c.expire(HISTORY[-1].checkpoint, c.now_s()))
            seat = await kit.launch(there.service, agents)
            for rank, agent in enumerate(agents):
                agent.serve(seat, rank, loaded=True)
                agent.hold(seat.run, 400, seat.generation, rank)
                await there.service.report(agent.inventory())
            await there.end(agents)
            for agent in agents:
                agent.shards.clear()
                await there.service.report(agent.inventory())
            with pytest.raises(error) as refused:
                await there.roll_back(*to)
            return refused.value

    refused = run_async(main)

    assert why in refused.message


def test_a_step_in_memory_alone_is_gone_back_to_while_it_lies_there_and_not_once_it_is_left(
    kit, agents, sqlite_url
):
    async def main():
        async with over(kit, sqlite_url) as there:
            seat = await kit.launch(there.service, agents)
            for step in (10, 15, 20):
                for rank, agent in enumerate(agents):
                    agent.serve(seat, rank, loaded=True, step=step)
                    agent.hold(seat.run, step, seat.generation, rank)
                for agent in agents:
                    await there.service.report(agent.inventory())
            for agent in agents:  # its slots have been used again
                agent.shards = [held for held in agent.shards if held.shard.id.step != 15]
            await there.end(agents)
            back = await there.roll_back(10)
            with pytest.raises(PreconditionError) as refused:
                await there.roll_back(20)
            return back, refused.value, await there.chosen(kit, agents, b"second")

    back, refused, chosen = run_async(main)

    assert [20] == [key.step for key in back.left], "of step 15 there was nothing"
    assert "was left behind and is not in the object store" in refused.message
    assert chosen == (10, 1)


# -- what the bucket proves ------------------------------------------------------------------------


def test_a_catalogue_that_is_lost_afterwards_does_not_bring_back_what_was_left(
    kit, agents, database_url, tmp_path
):
    """P6, ADR 0065: the record lies beside the run's checkpoints before the answer is given."""
    store = MemoryStore()
    put(store, *HISTORY)

    async def main():
        async with over(kit, database_url, store) as there:
            await there.archive.adopt(JOB)
            done = await there.roll_back(100, holder="ada@box", reason="it diverged")
        async with over(kit, f"sqlite:///{tmp_path / 'new.db'}", store) as there:
            chosen = await there.chosen(kit, agents, b"second")
            run = await there.service.read(lambda c: c.load_run(RUN))
            return done, chosen, run, await there.service.read(lambda c: c.rollbacks(RUN))

    done, chosen, run, known = run_async(main)

    assert chosen == (100, 1)
    assert run.generation == done.rollback.generation + 1
    assert [replace(done.rollback, recorded=True)] == known


def test_a_backup_from_before_a_rollback_learns_of_it_at_the_next_start(
    kit, agents, sqlite_url, tmp_path
):
    store = MemoryStore()
    put(store, *HISTORY)
    other = f"sqlite:///{tmp_path / 'other.db'}"

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
        async with over(kit, other, store) as there:
            await there.archive.adopt(JOB)
            await there.roll_back(200)
            await there.roll_back(100)
            await there.roll_back(300)
        async with over(kit, sqlite_url, store) as there:
            return await there.chosen(kit, agents, b"second")

    assert run_async(main) == (300, 1)


class Failing(MemoryStore):
    """Refuses to be written to while ``full``; ``silent``: after it was."""

    full = silent = False

    def put(self, key, data, *, if_absent=False):
        if self.full:
            raise UnavailableError("503")
        etag = super().put(key, data, if_absent=if_absent)
        if self.silent:
            raise UnavailableError("no answer")
        return etag


def test_a_record_that_could_not_be_written_is_owed_and_a_repeat_pays(kit, sqlite_url):
    store = Failing()
    put(store, *HISTORY)

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
            store.full = True
            with pytest.raises(UnavailableError) as failed:
                await there.roll_back(100)
            store.full = False
            again = await there.roll_back(100)
            return failed.value, again, await there.service.read(lambda c: c.rollbacks(RUN))

    failed, again, (known,) = run_async(main)

    assert "was rolled back, but the object store has no record" in failed.message
    assert again.repeated
    assert known.recorded
    key = rollback_key(JOB, RUN, known.generation)
    record = records.decode(store.get(key, length_bytes_max=1 << 14))
    assert (record.to, record.generation) == (known.to, known.generation)


def test_the_next_start_writes_a_record_that_is_owed(kit, agents, sqlite_url):
    store = Failing()
    put(store, *HISTORY)

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
            store.silent = True
            with pytest.raises(UnavailableError):
                await there.roll_back(100)
            store.silent = False
            chosen = await there.chosen(kit, agents, b"second")
            return chosen, await there.service.read(lambda c: c.rollbacks(RUN))

    chosen, (known,) = run_async(main)

    assert (chosen, known.recorded) == ((100, 1), True)


def test_a_store_that_does_not_answer_leaves_all_as_it_was(kit, sqlite_url):
    class Away(MemoryStore):
        away = False

        def folders(self, prefix=""):
            if self.away:
                raise UnavailableError("connection refused")
            return super().folders(prefix)

    store = Away()
    put(store, *HISTORY)

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
            store.away = True
            with pytest.raises(UnavailableError) as failed:
                await there.roll_back(100)
            return failed.value, await there.service.read(lambda c: c.load_run(RUN))

    failed, run = run_async(main)

    assert "was not rolled back" in failed.message
    assert run.usable(HISTORY[-1].checkpoint)


def test_a_record_that_cannot_be_read_stops_a_start_unless_something_was_begun_since(
    kit, agents, sqlite_url
):
    """Nobody knows where to: the newest step may be what somebody wanted to get away from."""
    store = MemoryStore()
    put(store, *HISTORY)
    key = rollback_key(JOB, RUN, 2)
    store.put(key, b"{}")

    async def main():
        async with over(kit, sqlite_url, store) as there:
            with pytest.raises(PreconditionError) as refused:
                await there.chosen(kit, agents, b"first")
            put(store, manifest(150, 3, parent=(100, 1)))
            return refused.value, await there.chosen(kit, agents, b"first")

    refused, chosen = run_async(main)

    assert f"{key} cannot be read, which says where to" in refused.message
    assert chosen == (150, 3)


def test_a_record_of_another_run_or_number_is_none(kit, agents, sqlite_url):
    """P9: what a name says and what is in it must agree; it costs the start nothing."""
    store = MemoryStore()
    put(store, *HISTORY, manifest(150, 9, parent=(100, 1)))
    lies = records.Rollback(job=JOB, to=HISTORY[0].checkpoint, generation=8, created_at_s=1.0)
    store.put(rollback_key(JOB, RUN, 5), records.encode(lies))
    store.put(f"{JOB}/{RUN}/rollback.g07.json", records.encode(lies))

    async def main():
        async with over(kit, sqlite_url, store) as there:
            chosen = await there.chosen(kit, agents, b"first")
            return chosen, await there.service.read(lambda c: c.rollbacks(RUN))

    assert run_async(main) == ((150, 9), [])


def test_a_decision_that_is_open_is_closed_by_force(kit, agents, sqlite_url):
    """M2: nobody is left waiting for a proposal of what was rolled back."""
    store = MemoryStore()
    put(store, *HISTORY)

    async def main():
        async with over(kit, sqlite_url, store) as there:
            before = await there.chosen(kit, agents, b"first")
            await there.roll_back(100, force=True)
            run = await there.service.read(lambda c: c.load_run(RUN))
            return before, run, await there.chosen(kit, agents, b"second")

    before, run, after = run_async(main)

    assert (before, after) == ((300, 1), (100, 1))
    assert (DecisionState.LOST, ()) == (run.decision.state, run.pins)
    assert "rolled the job back to step 100" in run.decision.reason


def test_how_a_checkpoint_came_about_is_told_and_outlives_the_catalogue(
    kit, agents, sqlite_url, tmp_path
):
    """G19: code, command, user and parent of each attempt, and the rollback between."""
    store = MemoryStore()
    first = Origin(commit="4fe1c9a", tree=Tree.DIRTY, command="train.py --lr 1", user="ada@box")
    put(store, replace(manifest(100), origin=first), manifest(200), manifest(300))

    async def main():
        async with over(kit, sqlite_url, store) as there:
            await there.archive.adopt(JOB)
            await there.roll_back(100, holder="bob@box", reason="it diverged")
            second = replace(first, commit="5ab", tree=Tree.CLEAN, user="x" * 500)
            for rank in (1, 0):  # rank 0 says it, and need not come first
                wish = kit.wish(rank, agents[rank].name, b"second")
                said = replace(wish.spec, origin=second if rank == 0 else None)
                seat = await there.service.register(replace(wish, spec=said))
                agents[rank].serve(seat, rank)
            for agent in agents:
                await there.service.report(agent.inventory())
            for rank, agent in enumerate(agents):
                agent.serve(seat, rank, ready_decision=1)
                await there.service.report(agent.inventory())
            key = CheckpointId(RUN, 150, seat.generation)
            line = await there.service.read(lambda c: users.line(c, key))
        async with over(kit, f"sqlite:///{tmp_path / 'new.db'}", store) as there:
            await there.archive.adopt(JOB)
            key = HISTORY[0].checkpoint
            return line, await there.service.read(lambda c: users.line(c, key))

    (newest, oldest), found_again = run_async(main)

    assert ("5ab", Tree.CLEAN) == (newest.beginning.origin.commit, newest.beginning.origin.tree)
    assert len(newest.beginning.origin.user) == USER_LENGTH_MAX
    assert newest.beginning.parent == HISTORY[0].checkpoint
    assert ("bob@box", "it diverged") == (newest.rollback.holder, newest.rollback.reason)
    assert (first, None) == (oldest.beginning.origin, oldest.beginning.parent)
    assert [first] == [one.beginning.origin for one in found_again]


def test_a_record_counts_though_nothing_of_the_job_was_stored_yet(
    kit, agents, sqlite_url, tmp_path
):
    """P6: else its generation is given again, and what that saves is left behind later."""
    store = MemoryStore()

    async def main():
        async with over(kit, sqlite_url, store) as there:
            seat = await kit.launch(there.service, agents)
            for rank, agent in enumerate(agents):
                agent.serve(seat, rank, loaded=True, step=10)
                agent.hold(seat.run, 10, seat.generation, rank)
            for agent in agents:
                await there.service.report(agent.inventory())
            await there.end(agents)
            done = await there.roll_back(10)
        for agent in agents:
            agent.shards.clear()
            agent.ranks = ()
        async with over(kit, f"sqlite:///{tmp_path / 'new.db'}", store) as there:
            after = await kit.launch(there.service, agents, b"second", launcher="of second")
            put(store, manifest(50, after.generation))
            await there.end(agents)
            return done, after, await there.chosen(kit, agents, b"third")

    done, after, chosen = run_async(main)

    assert after.generation > done.rollback.generation
    assert (50, after.generation) == chosen
