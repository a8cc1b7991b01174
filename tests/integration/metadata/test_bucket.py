"""Another cluster with nothing but the bucket: what is taken in, passed over, never overwritten."""

import asyncio
import importlib.util
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.decision import DecisionState
from holdfast.errors import AccessError, NotFoundError, PreconditionError, UnavailableError
from holdfast.format.keys import manifest_key, segment_key
from holdfast.format.manifest import encode
from holdfast.objectstore.directory import DirectoryStore
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive, known, read
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.users import At

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB, manifest, put = shelf.JOB, shelf.manifest, shelf.put


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    """A store that is a fake, and one that is files."""
    if request.param == "memory":
        return MemoryStore()
    return DirectoryStore(tmp_path / "bucket", make=True)


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'catalogue.db'}"


def tiered(kit):
    return replace(kit.LIMITS, object_tier=True)


async def decision(service, agents, seat):
    """What the newest attempt should restore."""
    view = await service.report(agents[0].inventory())
    return next(run for run in view.runs if run.run == seat.run).decision


def test_a_new_cluster_restores_what_stands_and_not_what_was_left_behind(
    kit, agents, store, database_url
):
    """F74, P6: generation 4 restored 100 of generation 3, so its 150 stands and 200 does not."""
    put(
        store,
        manifest(100, 3),
        manifest(200, 3),
        manifest(150, 4, parent=(100, 3), notes={"loss": 0.5}),
    )

    async def main():
        async with kit.running(database_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            return seat, await decision(service, agents, seat), await shelf.rows(service)

    seat, chosen, rows = asyncio.run(main())

    assert (first_run(JOB), 5) == (seat.run, seat.generation)
    assert (DecisionState.PROPOSED, 150, 4) == (
        chosen.state,
        chosen.checkpoint.step,
        chosen.checkpoint.generation,
    )
    assert [(200, 3), (150, 4), (100, 3)] == [(r.id.step, r.id.generation) for r in rows]
    assert ['{"loss": 0.5}'] == [row.row.notes for row in rows if row.id.step == 150]
    assert all(row.row.durable_at_s and row.scrubbed_at_s is None for row in rows)


def test_a_bucket_without_the_job_is_a_fresh_start(kit, agents, store, sqlite_url):
    put(store, manifest(5, job="another"))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            return await decision(service, agents, seat)

    assert asyncio.run(main()).fresh


def test_what_is_malformed_is_passed_over_and_said(kit, agents, store, sqlite_url):
    """P9: a manifest that lies costs its own checkpoint, no other."""
    put(store, manifest(100))
    bad = {
        200: b"{",
        300: b'{"format": "other"}',
        400: store.get(manifest_key(JOB, manifest(100).checkpoint), length_bytes_max=1 << 20),
    }
    for step, data in bad.items():
        store.put(manifest_key(JOB, manifest(step).checkpoint), data)
    store.put(f"{JOB}/{first_run(JOB)}/notes.txt", b"not ours")

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            chosen = await decision(service, agents, seat)
            events = await service.read(lambda c: c.last_events(100))
            report = await service.archive.rebuild(None)
            return chosen, [e for e in events if e["kind"] == "import_skipped"], report

    chosen, skipped, report = asyncio.run(main())

    assert 100 == chosen.checkpoint.step
    assert {"200", "300", "400"} == {e["message"].split("step-")[1].split(".")[0] for e in skipped}
    assert (0, 0, 3) == (report.jobs, report.checkpoints, len(report.skipped))
    assert all(item.reason for item in report.skipped)


class Broken(MemoryStore):
    """Fails at every listing."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def folders(self, prefix=""):
        raise self.error


@pytest.mark.parametrize(
    "error", [UnavailableError("503"), AccessError("403"), NotFoundError("no bucket")]
)
def test_a_store_that_cannot_be_asked_is_no_fresh_start(kit, agents, sqlite_url, error):
    """F74: the job is not even created, so the next try asks again."""

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, Broken(error))
            with pytest.raises(UnavailableError):
                await kit.launch(service, agents)
            known = await service.read(lambda c: c.run_of(JOB))
            store = MemoryStore()
            put(store, manifest(7))
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            return known, await decision(service, agents, seat)

    known, chosen = asyncio.run(main())

    assert known is None
    assert 7 == chosen.checkpoint.step


def test_a_manifest_that_cannot_be_read_just_now_is_not_passed_over(kit, agents, sqlite_url):
    """It may be the newest: silence about one object is no proof that there is nothing."""

    class Slow(MemoryStore):
        def get(self, key, *, length_bytes_max):
            raise UnavailableError("slow down")

    store = Slow()
    put(store, manifest(7))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            with pytest.raises(UnavailableError, match="slow down"):
                await kit.launch(service, agents)

    asyncio.run(main())


def test_taking_in_twice_changes_nothing_and_never_what_is_known(kit, store, database_url):
    """P6: idempotent; what has expired, is pinned or has notes here stays as it is."""
    put(store, *(manifest(step, notes={"from": "bucket"}) for step in (10, 20, 30)))

    async def main():
        async with kit.running(database_url, tiered(kit)) as service:
            await shelf.shelve(service, manifest(10, notes={"from": "here"}), manifest(20))
            archive = BucketArchive(service, store)
            await service.change(lambda c: users.remove(c, At(JOB, 10), force=False))
            before = await shelf.rows(service)
            first = await archive.rebuild(JOB)
            between = await shelf.rows(service)
            second = await archive.rebuild(None)
            return before, first, between, second, await shelf.rows(service)

    before, first, between, second, after = asyncio.run(main())

    assert (1, 1) == (first.jobs, first.checkpoints)
    assert before == between[1:]
    assert (0, 0) == (second.jobs, second.checkpoints)
    assert between == after


def test_a_lost_catalogue_finds_every_job_again(kit, store, sqlite_url):
    """P6: also jobs whose names are parts of each other's."""
    jobs = ("a", "a/b", "team/gpt.x")
    put(store, *(manifest(step, job=job) for job in jobs for step in (1, 2)))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            report = await BucketArchive(service, store).rebuild(None)
            return report, [len(await shelf.rows(service, job)) for job in jobs]

    report, counts = asyncio.run(main())

    assert (3, 6, ()) == (report.jobs, report.checkpoints, report.skipped)
    assert [2, 2, 2] == counts


@pytest.mark.parametrize(("runs", "chosen"), [(("old", "new"), "new"), (("new", "named"), "named")])
def test_of_several_runs_the_one_that_the_name_gives_or_the_newest_is_taken(
    kit, sqlite_url, runs, chosen
):
    """And the event says that there were others."""
    made_s = {"old": 1000.0, "new": 5000.0, "named": 10.0}
    ids = {"old": "r1", "new": "r2", "named": first_run(JOB)}
    store = MemoryStore()
    put(store, *(manifest(1, run=ids[run], created_s=made_s[run]) for run in runs))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            await BucketArchive(service, store).adopt(JOB)
            events = await service.read(lambda c: c.last_events(10))
            return await service.read(lambda c: c.run_of(JOB)), events[0]["message"]

    run, message = asyncio.run(main())

    assert ids[chosen] == run
    assert "one of 2 in the bucket" in message


def test_another_run_than_the_one_known_here_is_left_alone_and_said(kit, agents, sqlite_url):
    store = MemoryStore()
    put(store, manifest(1, run="r1"))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            await kit.launch(service, agents)
            report = await BucketArchive(service, store).rebuild(JOB)
            return report, await shelf.rows(service), await shelf.kinds(service)

    report, rows, kinds = asyncio.run(main())

    assert (0, []) == (report.checkpoints, rows)
    assert "import_skipped" in kinds


def test_a_folder_copied_by_hand_under_another_name_is_refused_and_costs_no_other(kit, sqlite_url):
    """A run belongs to one job; neither a fresh start nor a mix of two jobs comes of it."""
    store = MemoryStore()
    put(store, manifest(1, job="a"), manifest(1, job="copy", run=first_run("a")))
    put(store, manifest(1, job="z"))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            report = await service.archive.rebuild(None)
            with pytest.raises(PreconditionError, match="but of a here"):
                await service.register(kit.wish(0, "n", job="copy"))
            return report

    report = asyncio.run(main())

    assert (2, ["copy/"]) == (report.jobs, [item.key for item in report.skipped])


def test_what_is_collected_while_it_is_taken_in_is_not_taken_in(kit, sqlite_url):
    """A row without objects could be the one that retention believes in."""

    class Collected(MemoryStore):
        def get(self, key, *, length_bytes_max):
            data = super().get(key, length_bytes_max=length_bytes_max)
            if "step-20." in key:
                self.delete([key])
            return data

    store = Collected()
    put(store, manifest(20), manifest(30))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            await shelf.shelve(service, manifest(10))
            report = await BucketArchive(service, store).rebuild(JOB)
            return report.checkpoints, [row.id.step for row in await shelf.rows(service)]

    assert (1, [30, 10]) == asyncio.run(main())


def test_a_reading_that_is_told_to_stop_stops(store):
    put(store, manifest(1))
    stop = threading.Event()
    stop.set()

    with pytest.raises(UnavailableError):
        read(store, JOB, stop)


def test_ranks_that_register_at_once_share_one_look(kit, sqlite_url):
    """Two registrations, one reading of the bucket, one generation."""

    class Counting(MemoryStore):
        reads = 0

        def get(self, key, *, length_bytes_max):
            Counting.reads += 1
            return super().get(key, length_bytes_max=length_bytes_max)

    store = Counting()
    put(store, manifest(7))

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            return await asyncio.gather(
                service.register(kit.wish(0, "a")), service.register(kit.wish(1, "b"))
            )

    seats = asyncio.run(main())

    assert 1 == Counting.reads
    assert 1 == len(set(seats))


@pytest.mark.parametrize("left", ["a shard", "a damaged manifest"])
def test_generations_go_above_what_is_half_written_or_passed_over(
    kit, agents, store, sqlite_url, left
):
    """P2: the next attempt writes into no folder that an older one, or its worker, still may."""
    put(store, manifest(100, 2))
    orphan = manifest(200, 6)
    if left == "a shard":
        store.put(segment_key(JOB, orphan.shards[0].id, 2), b"half")
    else:
        store.put(manifest_key(JOB, orphan.checkpoint), b"{")

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            return seat, await decision(service, agents, seat)

    seat, chosen = asyncio.run(main())

    assert 7 == seat.generation
    assert (100, 2) == (chosen.checkpoint.step, chosen.checkpoint.generation)


def test_a_folder_without_a_manifest_is_no_checkpoint_but_counts_as_a_generation(
    kit, agents, store, sqlite_url
):
    store.put(segment_key(JOB, manifest(10, 3).shards[0].id, 2), b"half")

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            seat = await kit.launch(service, agents)
            return seat, await decision(service, agents, seat)

    seat, chosen = asyncio.run(main())

    assert (4, True) == (seat.generation, chosen.fresh)


def test_a_job_of_which_nothing_can_be_read_is_no_fresh_start(kit, agents, store, sqlite_url):
    """P4: a newer version's checkpoints, say; the first step must not come after such a loss."""
    newer = encode(manifest(100)).replace(b'"version":1', b'"version":99')
    store.put(manifest_key(JOB, manifest(100).checkpoint), newer)

    async def main():
        async with kit.running(sqlite_url, tiered(kit)) as service:
            service.archive = BucketArchive(service, store)
            with pytest.raises(PreconditionError, match=r"no checkpoint of gpt/small .*step-100"):
                await kit.launch(service, agents)
            events = await service.read(lambda c: c.last_events(100))
            store.delete([manifest_key(JOB, manifest(100).checkpoint)])
            seat = await kit.launch(service, agents)
            return events, await decision(service, agents, seat)

    events, chosen = asyncio.run(main())

    assert "import_skipped" in {event["kind"] for event in events}
    assert chosen.fresh


def test_two_services_that_adopt_at_once_take_everything_in_once(kit, store, database_url):
    """P6: the ranks of one attempt register with both; one run, one generation, each row once."""
    put(store, manifest(100, 3), manifest(200, 3), manifest(150, 4, parent=(100, 3)))

    async def main():
        async with (
            kit.running(database_url, tiered(kit)) as one,
            kit.running(database_url, tiered(kit)) as other,
        ):
            for service in (one, other):
                service.archive = BucketArchive(service, store)
            wishes = [
                (one, other)[rank % 2].register(kit.wish(rank, "a", world=16)) for rank in range(16)
            ]
            seats = await asyncio.gather(*wishes)
            return seats, await shelf.rows(one), await shelf.kinds(one)

    seats, rows, kinds = asyncio.run(main())

    assert {(first_run(JOB), 5)} == {(seat.run, seat.generation) for seat in seats}
    assert [(200, 3), (150, 4), (100, 3)] == [(r.id.step, r.id.generation) for r in rows]
    assert 1 == kinds.count("checkpoints_adopted")


async def test_a_catalogue_from_a_backup_takes_in_what_the_bucket_has_beyond_it(
    kit, agents, store, database_url
):
    """M1, P6; defect A9: the newest step is restored, no generation is used twice.

    Step 200 of generation 2 is known. Generation 4 restored it and wrote step 400; generation 5
    left a folder without a manifest.
    """
    second, fourth = manifest(200, 2), manifest(400, 4, parent=(200, 2))
    put(store, second)
    async with kit.running(database_url, tiered(kit)) as service:
        await shelf.shelve(service, second)
        put(store, fourth)
        half = shelf.manifest(500, 5)
        store.put(manifest_key(JOB, half.checkpoint).replace("manifest.json", "left"), b"half")
        service.archive = BucketArchive(service, store)

        seat = await kit.launch(service, agents, b"after the backup")

        assert 6 == seat.generation
        chosen = await decision(service, agents, seat)
        assert (DecisionState.PROPOSED, fourth.checkpoint) == (chosen.state, chosen.checkpoint)
        reading = await asyncio.to_thread(
            read, store, JOB, threading.Event(), await service.read(lambda c: known(c, JOB))
        )
        assert () == reading.found, "what is known by now is not read again"


async def test_another_jobs_run_beside_a_known_one_is_no_matter_at_a_restart(
    kit, agents, store, database_url
):
    """A9: an unreadable or foreign manifest is no reason to refuse a job that is known."""
    put(store, manifest(900, 9, run="ffffffffffff"))
    async with kit.running(database_url, tiered(kit)) as service:
        await shelf.shelve(service, manifest(200, 2))
        store.put(manifest_key(JOB, manifest(300, 2).checkpoint), b"{}")
        service.archive = BucketArchive(service, store)
        seat = await kit.launch(service, agents)

        assert 3 == seat.generation
        assert 200 == (await decision(service, agents, seat)).checkpoint.step
        assert 1 == (await shelf.kinds(service)).count("import_skipped"), "the unreadable one"
