"""The REST edge and the dashboard: for people and scripts; agents speak gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Annotated

from fastapi import FastAPI, Header, Query
from fastapi.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException

from holdfast.core.ids import GENERATION_MAX, STEP_MAX, job_name
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast_services.kit import rest as kit
from holdfast_services.metadata.calls.launches import Launches
from holdfast_services.metadata.calls.reports import Reports
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges import documents, ledgers, metrics
from holdfast_services.metadata.edges.dashboard.pages import unrouted
from holdfast_services.metadata.edges.dashboard.routes import dashboard_router
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest_launches import launches_router
from holdfast_services.metadata.edges.rest_users import OneOf, Step, users_router
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents, users
from holdfast_services.metadata.usecases.users import At

EVENT_ID_DIGITS_MAX = 18
EVENTS_PER_ANSWER_MAX = 1000
EVENTS_AT_START = 50
CHECKPOINTS_PER_ANSWER_MAX = 1000
STREAM_POLL_S = 1.0

Limit = Annotated[int, Query(ge=1, le=EVENTS_PER_ANSWER_MAX)]
Rows = Annotated[int, Query(ge=1, le=CHECKPOINTS_PER_ANSWER_MAX, description="At most so many")]
Before = Annotated[
    int | None,
    Query(ge=0, le=STEP_MAX, description="Only what comes after this row: its step"),
]
BeforeGeneration = Annotated[
    int, Query(ge=0, le=GENERATION_MAX, description="And its generation, beside `before`")
]
Durable = Annotated[
    bool, Query(description="Only what is in the object store, or on its way there")
]


def make_app(
    transactor: Transactor,
    reports: Reports,
    launches: Launches,
    objects: ObjectTier,
    stopping: asyncio.Event,
    names: Collection[str] = (),
) -> FastAPI:
    """Return the application; event streams end when ``stopping`` is set.

    ``names`` are what browsers know it by besides this machine's own; see ``visitors``.
    """
    app = kit.make_app("Holdfast metadata", names)
    _add_health(app, transactor)
    _add_metrics(app, transactor, reports, objects)
    app.include_router(users_router(transactor, objects))
    app.include_router(launches_router(transactor, launches))
    _add_checkpoints(app, transactor)
    _add_jobs(app, transactor)
    _add_events(app, transactor, stopping)
    app.include_router(dashboard_router(transactor, objects))
    app.add_exception_handler(HTTPException, unrouted)
    return app


def _add_health(app: FastAPI, transactor: Transactor) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer while the process runs."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Answer while the catalogue can be read and was written lately: a disk may be full."""
        await transactor.read(agents.check_written)
        return {"status": "ready"}


def _add_metrics(
    app: FastAPI, transactor: Transactor, reports: Reports, objects: ObjectTier
) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def figures() -> str:
        """Answer with the figures of this process and the catalogue, for Prometheus."""
        return await metrics.text(transactor, reports, objects)


# A job's name may hold slashes, so the longer paths come first: "{job:path}" takes them all.
def _add_checkpoints(app: FastAPI, transactor: Transactor) -> None:
    @app.get("/api/v1/jobs/{job:path}/checkpoints/{step}")
    async def checkpoint(
        job: str, step: Step, generation: OneOf = None
    ) -> documents.CheckpointDetailDoc:
        """Show one checkpoint with its shards; of several generations the one that counts."""
        world = await transactor.world()
        run = await _run(transactor, job, world)
        at = At(run.job, step, generation)
        item, stored = await transactor.read(lambda c: users.one(c, run, at))
        line = await transactor.read(lambda c: users.line(c, item.id))
        return documents.checkpoint_detail_doc(run, item, stored, world, line)

    @app.get("/api/v1/jobs/{job:path}/checkpoints", response_model=list[documents.CheckpointDoc])
    async def checkpoints(
        job: str,
        limit: Rows = CHECKPOINTS_PER_ANSWER_MAX,
        before: Before = None,
        before_generation: BeforeGeneration = 0,
        durable: Durable = False,
    ) -> Response:
        """List a job's checkpoints, newest first; page on with the last row's step."""
        world = await transactor.world()
        run = await _run(transactor, job, world)
        below = None if before is None else (before, before_generation)

        def rows(catalogue: Catalogue) -> bytes:
            now_s = catalogue.now_s()
            found = catalogue.listed(run.id, now_s, below=below, durable=durable, limit=limit)
            return documents.checkpoints_json(run, found, world)

        # Made in the thread that reads: a thousand rows would hold up the loop.
        return Response(await transactor.read(rows), media_type="application/json")


def _add_jobs(app: FastAPI, transactor: Transactor) -> None:
    @app.get("/api/v1/jobs")
    async def jobs() -> list[documents.JobDoc]:
        """List the jobs by name."""
        world = await transactor.world()
        names = await transactor.read(lambda c: [row["name"] for row in c.job_rows()])
        runs = [await _known(transactor, name, world) for name in names]
        return [documents.job_doc(run, world) for run in runs if run and not run.removed]

    @app.get("/api/v1/jobs/{job:path}/ledger")
    async def ledger(job: str) -> ledgers.LedgerDoc:
        """Show where a job's time went: trained, stalled, lost, down; month by month."""
        world = await transactor.world()
        return ledgers.ledger_doc(await _run(transactor, job, world), world)

    @app.get("/api/v1/jobs/{job:path}")
    async def one_job(job: str) -> documents.JobDoc:
        """Show one job."""
        world = await transactor.world()
        return documents.job_doc(await _run(transactor, job, world), world)

    @app.get("/api/v1/nodes")
    async def nodes() -> list[documents.NodeDoc]:
        """List the nodes, live and lost."""
        world = await transactor.world()
        return [documents.node_doc(world.nodes[name], world) for name in sorted(world.nodes)]


async def _run(transactor: Transactor, job: str, world: World) -> Run:
    """Return a job's run.

    Raises:
        NotFoundError: there is none, or it was removed.
    """
    name = job_name(job)
    run = await _known(transactor, name, world)
    if run is None or run.removed:
        raise NotFoundError(f"no job {name}", job=name)
    return run


async def _known(transactor: Transactor, name: str, world: World) -> Run | None:
    """Return a job's run from the snapshot, or from the catalogue when nothing moves it."""
    run = next((run for run in world.runs if run.job == name), None)
    return run or await transactor.read(lambda c: c.load_run(c.run_of(name) or ""))


def _add_events(app: FastAPI, transactor: Transactor, stopping: asyncio.Event) -> None:
    @app.get(
        "/api/v1/events",
        response_model=list[documents.EventDoc],
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events(
        accept: Annotated[str, Header()] = "*/*",
        last_event_id: Annotated[str | None, Header()] = None,
        limit: Limit = 100,
    ) -> Response:
        """Stream events; with Accept: application/json list the newest, newest first."""
        if "application/json" in accept and "text/event-stream" not in accept:
            rows = await transactor.read(lambda c: c.last_events(limit))
            return JSONResponse([documents.event_doc(row).model_dump() for row in rows])
        first = await _start(transactor) if last_event_id is None else _event_id(last_event_id)
        stream = _stream(transactor, stopping, first)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )


def _event_id(text: str) -> int:
    if not text.isdecimal() or len(text) > EVENT_ID_DIGITS_MAX:
        raise InvalidRequestError(f"Last-Event-ID {text[:40]!r} is not the number of an event")
    return int(text)


async def _start(transactor: Transactor) -> int:
    rows = await transactor.read(lambda c: c.last_events(EVENTS_AT_START))
    return int(rows[-1]["id"]) - 1 if rows else 0


async def _stream(transactor: Transactor, stopping: asyncio.Event, last: int) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    while not stopping.is_set():
        after = last
        rows = await transactor.read(lambda c: c.events_after(after, EVENTS_PER_ANSWER_MAX))  # noqa: B023
        for row in rows:
            last = int(row["id"])
            yield f"id: {last}\ndata: {documents.event_doc(row).model_dump_json()}\n\n"
        if not rows:
            yield ": still here\n\n"  # finds out that the reader has gone
            await transactor.changed(STREAM_POLL_S)
