"""The object tier over REST: what the command line and scripts meet."""

import asyncio
import importlib.util
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from holdfast.core.ids import CheckpointId
from holdfast.errors import UnavailableError
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.kit.queue.memory import MemoryQueue
from holdfast_services.metadata.calls import health
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app
from holdfast_services.metadata.usecases import workers

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB, manifest = shelf.JOB, shelf.manifest
BASE = f"/api/v1/jobs/{JOB}"


class Linking(MemoryStore):
    """A store that gives links, as S3 does."""

    def presign(self, key, valid_s):
        return f"https://bucket/{key}?valid={valid_s}"


@asynccontextmanager
async def serving(kit, folder, store=None):
    """A client of the application over a catalogue of its own."""
    url = f"sqlite:///{folder / 'catalogue.db'}"
    limits = replace(kit.LIMITS, object_tier=store is not None)
    async with kit.running(url, limits) as service:
        queue = MemoryQueue(lease_s=30.0)
        queue.offer(["collect/r/1/1"])
        objects = ObjectTier(
            health=health.StoreHealth(store),
            archive=BucketArchive(service, store) if store else None,
            queue=queue,
        )
        app = make_app(service, service.reports, service.launches, objects, asyncio.Event())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield service, client


def run(main):
    return asyncio.run(main())


def test_a_policy_is_set_shown_tried_and_carried_out(kit, tmp_path):
    """F87: PUT, GET, dry run, POST."""

    async def main():
        async with serving(kit, tmp_path) as (service, http):
            await shelf.shelve(service, *(manifest(step) for step in (10, 20, 30)))
            first = (await http.get(f"{BASE}/retention")).json()
            policy = {**first, "last": 1, "every": 20}
            put = await http.put(f"{BASE}/retention", json=policy)
            shown = (await http.get(f"{BASE}/retention")).json()
            dry = (await http.get(f"{BASE}/collect")).json()
            done = (await http.post(f"{BASE}/collect")).json()
            rows = (await http.get(f"{BASE}/checkpoints")).json()
            return first, put, shown, dry, done, rows

    first, put, shown, dry, done, rows = run(main)

    assert not any(first.values())
    assert put.json() == shown
    assert (1, 20) == (shown["last"], shown["every"])
    assert dry == done
    assert [(30, True), (20, True), (10, False)] == [(v["step"], v["keep"]) for v in done]
    assert [False, False, True] == [row["expired_at"] is not None for row in rows]


def test_a_checkpoint_is_shown_with_all_that_is_known_of_it(kit, tmp_path):
    """F91: level, notes, folder, pin, reader, and the object among the copies of each shard."""

    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, manifest(10, notes={"loss": 0.5}))
            one = f"{BASE}/checkpoints/10"
            await http.post(f"{one}/pin", json={"note": "paper"})
            await http.post(f"{one}/reads", json={"holder": "me", "ttl_s": 60})
            bad = manifest(10).shards[1].id
            await service.write(lambda c: workers.scrubbed(c, bad.checkpoint, [bad]))
            return (await http.get(one)).json()

    found = run(main)

    assert ("durable", True, "paper", ["read by me"]) == tuple(
        found[name] for name in ("level", "pinned", "pin_note", "held")
    )
    assert {"loss": 0.5} == found["notes"]
    assert f"{JOB}/{found['run']}/step-10.g1/" == found["folder"]
    assert (False, None, True) == (found["draining"], found["stored_shards"], found["bad"])
    copies = [(s["bad"], [(r["node"], r["tier"]) for r in s["replicas"]]) for s in found["shards"]]
    assert [(False, [("", "object")]), (True, [])] == copies


def test_a_read_is_begun_renewed_and_ended(kit, tmp_path):
    """G11."""

    async def main():
        async with serving(kit, tmp_path) as (service, http):
            await shelf.shelve(service, manifest(10), manifest(20))
            one = f"{BASE}/checkpoints/10"
            lease = (await http.post(f"{one}/reads", json={"holder": "x", "ttl_s": 30})).json()
            read = f"/api/v1/reads/{lease['id']}"
            longer = (await http.put(read, json={"ttl_s": 600})).json()
            refused = await http.delete(one)
            ended = [(await http.delete(read)).status_code for _ in range(2)]
            late = await http.put(read, json={"ttl_s": 600})
            gone = await http.delete(one)
            return lease, longer, refused, ended, late, gone

    lease, longer, refused, ended, late, gone = run(main)

    assert longer["until_s"] > lease["until_s"] + 500
    assert (412, "precondition") == (refused.status_code, refused.json()["kind"])
    assert [200, 200] == ended
    assert 404 == late.status_code
    assert (200, 10) == (gone.status_code, gone.json()["step"])


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("PUT", "/retention", {"last": -1}, 400),
        ("PUT", "/retention", {"last": 1, "lats": 2}, 400),
        ("PUT", "/retention", {"best": 1}, 400),
        ("PUT", "/retention", {"spaced_s": 0.5}, 400),
        ("POST", "/checkpoints/10/pin", {"note": "x" * 1001}, 400),
        ("POST", "/checkpoints/10/reads", {"holder": "me", "ttl_s": 1e9}, 400),
        ("POST", "/checkpoints/10/reads", {"holder": "", "ttl_s": 1}, 400),
        ("POST", "/checkpoints/11/pin", {"note": ""}, 404),
        ("POST", "/checkpoints/-1/pin", {"note": ""}, 400),
        ("GET", "/checkpoints/10?generation=9", None, 404),
        ("GET", "/checkpoints?limit=100000", None, 400),
        ("GET", "/checkpoints/10/links?valid_s=0", None, 400),
        ("GET", "/checkpoints/10/links", None, 412),
        ("DELETE", "/checkpoints/10/pin", None, 404),
        ("DELETE", "/checkpoints/10", None, 412),
        ("POST", "/save", None, 412),
    ],
)
def test_what_makes_no_sense_is_refused_as_a_problem(kit, tmp_path, method, path, body, code):
    async def main():
        async with serving(kit, tmp_path) as (service, http):
            await shelf.shelve(service, manifest(10))
            return await http.request(method, f"{BASE}{path}", json=body)

    answer = run(main)

    assert (code, "application/problem+json") == (
        answer.status_code,
        answer.headers["content-type"],
    )
    assert answer.json()["kind"]


def test_a_long_list_is_read_page_by_page(kit, tmp_path):
    """Newest first; a step that is there twice may be cut between two pages."""

    async def main():
        async with serving(kit, tmp_path) as (service, http):
            made = [manifest(step) for step in range(1, 21)]
            await shelf.shelve(service, *made, manifest(10, 2, parent=(9, 1)))
            found, query = [], "limit=5"
            while True:
                page = (await http.get(f"{BASE}/checkpoints?{query}")).json()
                found += [(row["step"], row["attempt"]) for row in page]
                assert all(row["attempt"] == row["generation"] for row in page)
                if len(page) < 5:
                    return found
                last = page[-1]
                query = f"limit=5&before={last['step']}&before_generation={last['generation']}"

    found = run(main)

    assert 21 == len(found)
    assert sorted(set(found), reverse=True) == found


def test_only_what_is_in_the_object_store_is_listed_when_asked_for(kit, tmp_path, agents):
    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, manifest(3))
            seat = await kit.launch(service, agents)
            for loaded in (False, True):
                for rank, agent in enumerate(agents):
                    agent.serve(seat, rank, ready_decision=1, loaded=loaded)
                    await service.report(agent.inventory())
            for rank, agent in enumerate(agents):
                agent.hold(seat.run, 5, seat.generation, rank)
                await service.report(agent.inventory())
            everything = (await http.get(f"{BASE}/checkpoints")).json()
            stored = (await http.get(f"{BASE}/checkpoints?durable=true")).json()
            job = (await http.get(BASE)).json()
            return everything, stored, job

    everything, stored, job = run(main)

    assert [5, 3] == [row["step"] for row in everything]
    assert [3] == [row["step"] for row in stored]
    assert 3 == job["newest_durable_step"]


def test_links_name_every_object_of_a_checkpoint(kit, tmp_path):
    """F90."""

    async def main():
        async with serving(kit, tmp_path, Linking()) as (service, http):
            await shelf.shelve(service, manifest(10))
            return (await http.get(f"{BASE}/checkpoints/10/links?valid_s=60")).json()

    links = run(main)

    shards = {f"shard-0000{r}-of-00002.{end}" for r in (0, 1) for end in ("safetensors", "sum")}
    assert {"manifest.json", *shards} == set(links)
    assert all(url.startswith(f"https://bucket/{JOB}/") for url in links.values())


def test_the_catalogue_is_rebuilt_from_the_store(kit, tmp_path):
    """P6."""
    store = MemoryStore()
    shelf.put(store, manifest(10), manifest(20))
    store.put(f"{JOB}/{manifest(1).checkpoint.run}/step-30.g1/manifest.json", b"[]")

    async def main():
        async with serving(kit, tmp_path, store) as (_, http):
            answer = await http.post("/api/v1/rebuild", json={"job": None})
            rows = (await http.get(f"{BASE}/checkpoints")).json()
            return answer.json(), [row["step"] for row in rows]

    answer, steps = run(main)

    assert (1, 2, [20, 10]) == (answer["jobs"], answer["checkpoints"], steps)
    assert [f"{JOB}/{manifest(1).checkpoint.run}/step-30.g1/manifest.json"] == [
        item["key"] for item in answer["skipped"]
    ]


class Down(MemoryStore):
    """Does not answer."""

    def check(self):
        raise UnavailableError("no route")


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        (None, {"url": None, "ok": False}),
        (MemoryStore(), {"url": "memory:", "ok": True, "error": ""}),
        (Down(), {"url": "memory:", "ok": False, "error": "no route"}),
    ],
    ids=["none", "up", "down"],
)
def test_the_state_of_the_store_is_shown(kit, tmp_path, store, expected):
    async def main():
        async with serving(kit, tmp_path, store) as (_, http):
            return (await http.get("/api/v1/store")).json()

    assert expected.items() <= run(main).items()


def test_a_store_that_hangs_is_said_to_and_holds_up_nobody(kit, tmp_path, monkeypatch):
    """Every wait has a deadline; the next look finds out that it is back."""
    monkeypatch.setattr(health, "CHECK_S_MAX", 0.05)
    answers = threading.Event()

    class Hanging(MemoryStore):
        def check(self):
            assert answers.wait(30)

    async def main():
        async with serving(kit, tmp_path, Hanging()) as (_, http):
            stuck = (await http.get("/api/v1/store")).json()
            answers.set()
            while not (state := (await http.get("/api/v1/store")).json())["ok"]:
                assert state["error"] == "no answer within 0.05 s"
            return stuck

    assert "no answer within 0.05 s" == run(main)["error"]


def test_figures_of_the_object_tier_are_served(kit, tmp_path):
    """F110."""

    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, manifest(10), manifest(20))
            await http.delete(f"{BASE}/checkpoints/10")
            bad = manifest(20).shards[0].id
            key = CheckpointId(bad.run, bad.step, bad.generation)
            await service.write(lambda c: workers.scrubbed(c, key, [bad]))
            await http.post(f"{BASE}/scrub")
            return (await http.get("/metrics")).text

    lines = dict(line.split() for line in run(main).splitlines() if line[0] != "#")
    lines = {name: value.removesuffix(".0") for name, value in lines.items()}

    expected = {
        "holdfast_checkpoints_durable": "2",
        "holdfast_durable_bytes": "400",
        "holdfast_checkpoints_draining": "0",
        "holdfast_draining_oldest_seconds": "0",
        "holdfast_checkpoints_expired": "1",
        "holdfast_checkpoints_bad": "1",
        "holdfast_scrubs_asked": "1",
        "holdfast_queue_waiting": "1",
        "holdfast_store_up": "1",
    }
    assert expected.items() <= lines.items()


def test_every_route_says_what_it_does(kit, tmp_path):
    """F92: the OpenAPI description is for people."""

    async def main():
        async with serving(kit, tmp_path) as (_, http):
            return (await http.get("/openapi.json")).json()

    paths = run(main)["paths"]

    methods = {(path, method): doc for path, one in paths.items() for method, doc in one.items()}
    assert ("/api/v1/jobs/{job}/checkpoints/{step}/pin", "post") in methods
    assert [] == [where for where, doc in methods.items() if not doc.get("description")]
