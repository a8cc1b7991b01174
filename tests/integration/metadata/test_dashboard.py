"""The dashboard over a real catalogue: pages, actions that are asked once more, who may not ask."""

import asyncio
import importlib.util
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.crowd import JOB as LARGE
from tests.crowd import Crowd, fill

from holdfast.objectstore.memory import MemoryStore
from holdfast_services.kit.queue.memory import MemoryQueue
from holdfast_services.metadata.calls import health
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app

_spec = importlib.util.spec_from_file_location("shelf", Path(__file__).parent / "shelf.py")
shelf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shelf)

JOB = shelf.JOB
STEP = f"/jobs/{JOB}/checkpoints/10"
PAGE_BYTES_MAX = 300_000


class Linking(MemoryStore):
    """A store that gives links, as S3 does."""

    def presign(self, key, valid_s):
        return f"https://bucket/{key}?valid={valid_s}"


@asynccontextmanager
async def serving(kit, folder, store=None, url=""):
    """A browser's view of the application over a catalogue of its own."""
    url = url or f"sqlite:///{folder / 'catalogue.db'}"
    limits = replace(kit.LIMITS, object_tier=store is not None)
    async with kit.running(url, limits) as service:
        objects = ObjectTier(
            health=health.StoreHealth(store),
            archive=BucketArchive(service, store) if store else None,
            queue=MemoryQueue(lease_s=30.0),
        )
        app = make_app(service, service.reports, service.launches, objects, asyncio.Event())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield service, client


def run(main):
    return asyncio.run(main())


async def post(http, path, **form):
    """Post a form as the page itself does."""
    return await http.post(path, data=form, headers={"Origin": "http://localhost"})


def test_each_page_is_html_that_lets_nothing_else_in(kit, tmp_path, agents):
    """Issue 14: strict policy on every page; a job that trains is on them."""

    async def main():
        async with serving(kit, tmp_path) as (service, http):
            seat = await kit.launch(service, agents)
            for rank, agent in enumerate(agents):
                agent.hold(seat.run, 10, seat.generation, rank)
                agent.hold(seat.run, 10, seat.generation, 1 - rank, owner=agents[1 - rank].name)
            for agent in agents:
                await service.report(agent.inventory())
            paths = ("/", "/nodes", "/events", f"/jobs/{JOB}", STEP, "/jobs/none", "/parts/store")
            return {path: await http.get(path) for path in paths}

    pages = run(main)

    assert [200] * 5 + [404, 200] == [answer.status_code for answer in pages.values()]
    for answer in pages.values():
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert f'href="/jobs/{JOB}"' in pages["/"].text
    assert "2 copies of each of 2 ranks, on 2 nodes." in pages[STEP].text
    assert "If it died now" in pages[f"/jobs/{JOB}"].text
    assert "no job none" in pages["/jobs/none"].text


def test_an_empty_catalogue_says_what_to_do(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, http):
            return [(await http.get(path)).text for path in ("/", "/nodes", "/events")]

    jobs, nodes, events = run(main)

    assert "No job has registered yet." in jobs
    assert "No node has reported yet." in nodes
    assert "No event fits." in events


def test_a_wrong_question_is_refused_with_a_page(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, http):
            asked = ("/?page=0", "/?state=odd", "/events?before=-1", f"/jobs/{JOB}/checkpoints/x")
            return [await http.get(path) for path in asked] + [await http.get("/assets/../x")]

    answers = run(main)

    assert [422, 422, 422, 422, 404] == [answer.status_code for answer in answers]
    assert all("<h1>" in answer.text for answer in answers[:4])


def test_what_is_not_there_is_not_asked_about(kit, tmp_path):
    """Neither a job nor a step of which nothing is known can be verified, pinned or deleted."""

    async def main():
        async with serving(kit, tmp_path, Linking()) as (service, http):
            await shelf.shelve(service, shelf.manifest(10))
            there = await http.get(f"{STEP}/pin?generation=1")
            asked = (
                "/jobs/none/scrub", "/jobs/none/checkpoints/10/pin?generation=1",
                f"/jobs/{JOB}/checkpoints/11/delete?generation=1", f"{STEP}/pin?generation=2",
            )  # fmt: skip
            return there, [await http.get(path) for path in asked]

    there, answers = run(main)

    assert 200 == there.status_code
    assert [404] * 4 == [answer.status_code for answer in answers]
    assert all("<h1>" in answer.text for answer in answers)


def test_a_message_of_what_was_done_is_one_of_ours(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path, Linking()) as (service, http):
            await shelf.shelve(service, shelf.manifest(10))
            return [(await http.get(f"/jobs/{JOB}?done={word}")).text for word in ("forged", "")]

    forged, bare = run(main)

    assert forged == bare


def test_an_address_where_nothing_is_is_a_page_to_a_browser_and_a_problem_to_others(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, http):
            wide = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
            page = await http.get("/nowhere/<b>", headers=wide)
            wrong = await http.post("/nodes", headers={**wide, "Origin": "http://localhost"})
            return page, wrong, await http.get("/nowhere"), await http.get("/jobs/none/")

    page, wrong, problem, slash = run(main)

    assert (404, 405, 404) == (page.status_code, wrong.status_code, problem.status_code)
    assert "nothing is at /nowhere/&lt;b&gt;" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "not_found" == problem.json()["kind"]
    assert (307, "/jobs/none") == (slash.status_code, slash.headers["location"])


def test_a_filter_that_no_text_fits_finds_no_event(kit, tmp_path, postgres_url):
    """Postgres refuses to be asked for NUL; no event holds one."""

    async def main():
        async with serving(kit, tmp_path, url=postgres_url) as (_, http):
            asked = ("/events?job=%00", "/events?node=a%00", "/events?kind=%00", "/?name=%00")
            return [await http.get(path) for path in asked]

    for page in run(main):
        assert 200 == page.status_code
        assert "No event fits." in page.text or "No job fits." in page.text


def test_pages_and_assets_are_asked_for_by_head(kit, tmp_path):
    """Whatever watches a web server asks so."""

    async def main():
        async with serving(kit, tmp_path) as (_, http):
            paths = ("/", "/nodes", "/assets/dashboard.css", "/jobs/none")
            return [(await http.head(path)).status_code for path in paths]

    assert [200, 200, 200, 404] == run(main)


def test_an_asset_is_kept_for_a_year_only_under_the_address_of_its_content(kit, tmp_path):
    """Two services of different versions behind one name: a browser may ask the older one."""

    async def main():
        async with serving(kit, tmp_path) as (_, http):
            page = (await http.get("/")).text
            path = re.search(r'"(/assets/dashboard.css[^"]*)"', page)[1]
            asked = (path, "/assets/dashboard.css?v=0123456789ab", "/assets/dashboard.css")
            return [(await http.get(one)).headers["cache-control"] for one in asked]

    mine, other, none = run(main)

    assert "immutable" in mine
    assert "no-cache" == other == none


def test_the_address_of_the_jobs_shows_them(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, http):
            return [(await http.get(path)).headers.get("location") for path in ("/jobs", "/jobs/")]

    assert ["/", "/"] == run(main)


def test_a_checkpoint_is_pinned_unpinned_and_deleted_after_it_was_asked(kit, tmp_path):
    """Each action has a page that says what follows; the rules refuse on that page."""

    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, *(shelf.manifest(step) for step in (10, 20)))
            asked = await http.get(f"{STEP}/pin?generation=1")
            pinned = await post(http, f"{STEP}/pin?generation=1", note="<b>best</b>")
            shown = await http.get(pinned.headers["location"])
            refused = await post(http, f"{STEP}/delete?generation=1")
            await post(http, f"{STEP}/unpin?generation=1")
            deleted = await post(http, f"{STEP}/delete?generation=1")
            return asked, pinned, shown, refused, deleted, await shelf.expired(service)

    asked, pinned, shown, refused, deleted, expired = run(main)

    assert "Pin: step 10 of attempt 1 of gpt/small" in asked.text
    assert (303, 412, 303) == (pinned.status_code, refused.status_code, deleted.status_code)
    assert "Pinned: it is kept" in shown.text
    assert "&lt;b&gt;best&lt;/b&gt;" in shown.text
    assert "Refused: step 10 of attempt 1 is pinned" in refused.text
    assert [10] == expired


def test_a_rollback_is_of_the_attempt_that_was_seen(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, *(shelf.manifest(step) for step in (10, 20)))
            asked = await http.get(f"{STEP}/rollback?generation=1")
            seen = re.search(r'name="attempt" value="(\d+)"', asked.text)[1]
            other = await post(http, f"{STEP}/rollback?generation=1", attempt="7")
            done = await post(
                http, f"{STEP}/rollback?generation=1", attempt=seen, reason="loss rose"
            )
            page = await http.get(done.headers["location"])
            return other, done, page.text

    other, done, page = run(main)

    assert (412, 303) == (other.status_code, done.status_code)
    assert "Rolled back: the next start restores this checkpoint." in page
    assert "superseded" in page


def test_links_and_verification_are_asked_for(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path, Linking()) as (service, http):
            await shelf.shelve(service, shelf.manifest(10))
            links = await post(http, f"{STEP}/links?generation=1", hours="2")
            scrub = await post(http, f"/jobs/{JOB}/scrub")
            page = await http.get(f"{STEP}?generation=1")
            save = await post(http, f"/jobs/{JOB}/save")
            return links, scrub, page.text, save

    links, scrub, page, save = run(main)

    assert "5 links, valid for 2 h" in links.text
    assert "valid=7200" in links.text
    assert f"/jobs/{JOB}?done=scrub" == scrub.headers["location"]
    assert "asked for, not done yet" in page
    assert 412 == save.status_code
    assert "cannot save now: not all ranks of it train" in save.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_a_page_of_another_site_can_do_nothing(kit, tmp_path, origin):
    """P9: a form of another site's page is refused by its Origin, before the rules are asked."""

    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, *(shelf.manifest(step) for step in (10, 20)))
            paths = [f"{STEP}/{name}?generation=1" for name in ("pin", "delete", "rollback")]
            answers = [
                await http.post(path, data={"attempt": "1"}, headers={"Origin": origin})
                for path in (*paths, f"/jobs/{JOB}/scrub", f"/jobs/{JOB}/save")
            ]
            return answers, await shelf.kinds(service), await shelf.expired(service)

    answers, kinds, expired = run(main)

    assert {403} == {answer.status_code for answer in answers}
    assert not {"checkpoint_pinned", "job_rolled_back", "checkpoint_expired"} & set(kinds)
    assert [] == expired


def test_a_form_that_is_none_or_too_long_is_refused(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path, MemoryStore()) as (service, http):
            await shelf.shelve(service, shelf.manifest(10))
            path = f"{STEP}/pin?generation=1"
            long = await post(http, path, note="x" * 20_000)
            many = await post(http, path, **{f"f{number}": "1" for number in range(20)})
            nul = await post(http, path, note="a\0b")
            return long, many, nul

    assert [400, 400, 400] == [answer.status_code for answer in run(main)]


def test_events_are_filtered_on_the_server_and_paged(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, http):
            await asyncio.to_thread(
                fill, f"sqlite:///{tmp_path / 'catalogue.db'}",
                Crowd(checkpoints=3, jobs=0, nodes=2, events=250),
            )  # fmt: skip
            first = (await http.get("/events?severity=warning&kind=node_lost")).text
            rest = (await http.get("/events?severity=error")).text
            page = (await http.get("/events?job=gpt")).text
            older = re.search(r'href="(/events\?[^"]*)" rel="next"', page)[1]
            return first, rest, (await http.get(older.replace("&amp;", "&"))).text

    lost, none, older = run(main)

    assert 63 == lost.count("<b>node_lost</b>")
    assert "Its copies count no more" in lost
    assert "No event fits." in none
    assert 100 == older.count('<li class="warning">')


def test_pages_of_a_full_catalogue_are_small(kit, tmp_path):
    """Issue 14: 10,000 checkpoints; a page and all that it loads stay under 300 kB."""

    async def main():
        async with serving(kit, tmp_path) as (_, http):
            await asyncio.to_thread(
                fill, f"sqlite:///{tmp_path / 'catalogue.db'}", Crowd(nodes=160)
            )
            paths = ("/", "/nodes", "/events", f"/jobs/{LARGE}", f"/jobs/{LARGE}/checkpoints/10001")
            return [await weigh(http, path) for path in paths]

    weights = run(main)

    assert max(weights) <= PAGE_BYTES_MAX, weights


async def weigh(http, path):
    """Return the bytes of a page and of all that it loads."""
    page = await http.get(path)
    assert page.status_code == 200, page.text
    loads = re.findall(r'(?:src|href)="(/assets/[^"]*)"', page.text)
    assets = [(await http.get(one)).content for one in loads]
    return len(page.content) + sum(map(len, assets))
