"""What REST does with requests that nobody of ours sends."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
import sqlalchemy

from holdfast.core.ids import job_name
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.calls.health import StoreHealth
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app


@asynccontextmanager
async def serving(kit, folder):
    """The application over a catalogue of its own and a client that is told of failures."""
    async with kit.running(f"sqlite:///{folder / 'catalogue.db'}") as service:
        nothing = ObjectTier(health=StoreHealth(None))
        app = make_app(service, service.reports, service.launches, nothing, asyncio.Event())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield app, service, client


@pytest.mark.parametrize("number", ["²", "9" * 19, "9" * 5000, "-1", "", "1.5"])
def test_an_event_id_that_is_no_number_of_an_event_is_refused(kit, tmp_path, number):
    """Defect R1: neither a bare failure nor a stream that breaks off."""

    async def main():
        async with serving(kit, tmp_path) as (_, _, http):
            headers = {"Last-Event-ID": number.encode("latin-1"), "Accept": "text/event-stream"}
            return await http.get("/api/v1/events", headers=headers)

    answer = asyncio.run(main())

    assert (400, "invalid_request") == (answer.status_code, answer.json()["kind"])


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/api/v1/jobs/a/collect", {"Origin": "http://evil.example"}),
        ("POST", "/api/v1/jobs/a/scrub", {"Origin": "null"}),
        ("PUT", "/api/v1/jobs/a/retention", {"Host": "evil.example"}),
        ("GET", "/api/v1/jobs", {"Host": "evil.example"}),
        ("GET", "/metrics", {"Host": "evil.example"}),
    ],
)
def test_a_page_of_another_site_gets_nothing_done(kit, tmp_path, method, path, headers):
    """Defect R3: a browser tab can neither change nor read anything here."""

    async def main():
        async with serving(kit, tmp_path) as (_, _, http):
            return await http.request(method, path, headers=headers)

    answer = asyncio.run(main())

    assert (403, "access") == (answer.status_code, answer.json()["kind"])


@pytest.mark.parametrize("job", ["a/checkpoints", "a/checkpoints/3", "a/retention", "a/scrub/b"])
def test_a_job_whose_name_reads_like_a_route_is_refused(kit, tmp_path, job):
    """Defect R2: its page would show another job's data."""

    async def main():
        async with serving(kit, tmp_path) as (_, service, _):
            await service.register(kit.wish(0, "node", job=job))

    with pytest.raises(InvalidRequestError, match="job name"):
        asyncio.run(main())


def test_a_wrong_method_and_a_failure_are_problems_of_their_own_code(kit, tmp_path, caplog):
    """Defect X7: 405 with what is allowed; 500 as problem+json, and the reason in the log only."""

    async def main():
        async with serving(kit, tmp_path) as (app, _, http):

            @app.get("/broken")
            async def broken() -> None:
                raise ZeroDivisionError("secret")

            return await http.post("/api/v1/nodes"), await http.get("/broken")

    wrong, failed = asyncio.run(main())

    assert (405, "invalid_request", 405) == (
        wrong.status_code,
        wrong.json()["kind"],
        wrong.json()["status"],
    )
    assert "GET" == wrong.headers["allow"]
    assert (500, "internal") == (failed.status_code, failed.json()["kind"])
    assert "application/problem+json" == failed.headers["content-type"]
    assert "secret" not in failed.text


async def test_a_database_that_takes_no_writes_is_not_ready(database_url, kit):
    """It can be read all the while: a standby, a full disk."""
    read_only = {
        "sqlite": "PRAGMA query_only = ON",
        "postgresql": "SET default_transaction_read_only = on",
    }
    async with kit.running(database_url, clock=True) as service:
        nothing = ObjectTier(health=StoreHealth(None))
        app = make_app(service, service.reports, service.launches, nothing, asyncio.Event())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

            async def until(status):
                async with asyncio.timeout(60):
                    while (answer := await http.get("/readyz")).status_code != status:
                        await service.changed(0.05)
                return answer

            await until(200)
            engine = service._engine

            @sqlalchemy.event.listens_for(engine, "checkout")
            def refuse(connection, *_):
                connection.cursor().execute(read_only[engine.dialect.name])
                connection.commit()

            refused = await until(503)
            others = [await http.get(path) for path in ("/healthz", "/api/v1/jobs")]

    assert "could not be written for" in refused.json()["detail"]
    assert all(answer.is_success for answer in others)


def test_no_job_has_a_name_that_ends_like_the_path_of_something_else(kit, tmp_path):
    """A name may hold slashes: of a job ``a/ledger`` nobody could ask for the document."""

    async def main():
        async with serving(kit, tmp_path) as (app, _, _):
            return app.openapi()["paths"]

    tails = {path.partition("/jobs/{job}/")[2].split("/")[0] for path in asyncio.run(main())}

    for word in tails - {""}:
        with pytest.raises(InvalidRequestError, match=word):
            job_name(f"a/{word}")
    assert {"checkpoints", "ledger", "scrub"} <= tails


async def test_a_text_that_no_database_takes_is_refused_by_its_name(database_url, kit):
    async with kit.running(database_url) as service:
        nothing = ObjectTier(health=StoreHealth(None))
        app = make_app(service, service.reports, service.launches, nothing, asyncio.Event())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            step = "/api/v1/jobs/a/checkpoints/1"
            answers = [
                await http.post(f"{step}/pin", json={"note": "a\0b"}),
                await http.post(f"{step}/reads", json={"holder": "a\0b", "ttl_s": 1}),
                await http.put("/api/v1/reads/a%00b", json={"ttl_s": 1}),
            ]

    assert [400] * 3 == [answer.status_code for answer in answers]
    told = [answer.json()["detail"].split(":")[0] for answer in answers]
    assert told == ["body.note", "body.holder", "path.lease"]


def test_the_ledger_of_a_job_that_never_trained_is_empty_and_of_none_not_found(kit, tmp_path):
    async def main():
        async with serving(kit, tmp_path) as (_, service, http):
            await service.register(kit.wish(0, "node", job="a/b"))
            paths = ("a/b", "a", "a%3F", "", "..%2Fa")
            return [await http.get(f"/api/v1/jobs/{path}/ledger") for path in paths]

    there, *others = asyncio.run(main())

    empty = {"trained_s": 0, "productive_s": 0, "stalled_s": 0, "lost_s": {}, "down_s": {}}
    all_of_it = {"month": "", **empty, "productive_share": None}
    assert there.json() == {"job": "a/b", "months": [], "total": all_of_it}
    assert [404, 400, 400, 400] == [answer.status_code for answer in others]
