"""The addresses of the pages: one request shows one page, whatever the size of the cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import RedirectResponse, Response

from holdfast.core.ids import GENERATION_MAX, STEP_MAX, job_name
from holdfast.errors import NotFoundError
from holdfast_services.metadata.calls.health import waiting_count
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard import news, node_rows, overview
from holdfast_services.metadata.edges.dashboard.actions import DONE, add_actions
from holdfast_services.metadata.edges.dashboard.charts import POINTS_COUNT_MAX
from holdfast_services.metadata.edges.dashboard.job_page import (
    STEPS_PER_PAGE,
    Read,
    checkpoint_page,
    job_page,
)
from holdfast_services.metadata.edges.dashboard.pages import PageRoute, answer, asset, render
from holdfast_services.metadata.edges.dashboard.texts import job_path
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.storage import Catalogue
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.users import At

SNAPSHOT_S_MAX = 2.0
"""How old a snapshot may be: so many people look at one."""
TEXT_LENGTH_MAX = 200
PAGES_MAX = 1_000_000
EVENT_NUMBER_MAX = (1 << 63) - 1
NEWS_ON_OVERVIEW = 10
NEWS_OF_JOB = 20
WENT_WRONG = ("warning", "error")

Text = Annotated[str, Query(max_length=TEXT_LENGTH_MAX)]
Page = Annotated[int, Query(ge=1, le=PAGES_MAX)]
Step = Annotated[int, Path(ge=0, le=STEP_MAX)]
Generation = Annotated[int | None, Query(ge=0, le=GENERATION_MAX)]
Before = Annotated[int | None, Query(ge=0, le=STEP_MAX)]
EventNumber = Annotated[int | None, Query(ge=0, le=EVENT_NUMBER_MAX)]


def dashboard_router(transactor: Transactor, objects: ObjectTier) -> APIRouter:
    """Return the pages."""
    router = APIRouter(route_class=PageRoute, include_in_schema=False)

    @router.get("/assets/{name}")
    async def one_asset(name: str, v: str = "") -> Response:
        return asset(name, v)

    @router.get("/jobs")
    @router.get("/jobs/")
    async def all_jobs() -> Response:
        return RedirectResponse("/")

    _add_overview(router, transactor, objects)
    _add_nodes(router, transactor)
    _add_events(router, transactor)
    add_actions(router, transactor, objects)
    _add_checkpoint(router, transactor)
    _add_job(router, transactor)
    return router


async def _world(transactor: Transactor) -> World:
    return await transactor.world(asyncio.get_running_loop().time() - SNAPSHOT_S_MAX)


def _run(catalogue: Catalogue, world: World, job: str) -> Run:
    """Return a job's run, from the snapshot if it is there.

    Raises:
        NotFoundError: there is none, or it was removed.
    """
    name = job_name(job)
    known = next((run for run in world.runs if run.job == name), None)
    run = known or catalogue.load_run(catalogue.run_of(name) or "")
    if run is None or run.removed:
        raise NotFoundError(f"no job {name}", job=name)
    return run


def _add_overview(router: APIRouter, transactor: Transactor, objects: ObjectTier) -> None:
    @router.get("/")
    async def jobs(
        name: Text = "",
        state: Literal["", "all", "training", "stopped", "trouble"] = "",
        page: Page = 1,
    ) -> Response:
        asked = overview.Asked(name=name.strip(), state=state or "all", page=page)
        world = await _world(transactor)

        def made(catalogue: Catalogue) -> str:
            names = [row["name"] for row in catalogue.job_rows()]
            view = overview.overview(
                asked, names, world, lambda job: catalogue.load_run(catalogue.run_of(job) or "")
            )
            rows = catalogue.events_like(NEWS_ON_OVERVIEW, severities=WENT_WRONG)
            return render("overview.html", view, events=news.items(rows, world.now_s))

        return answer(await transactor.read(made))

    # Apart from the page, which must not wait for a store or a queue that does not answer.
    @router.get("/parts/store")
    async def store() -> Response:
        state = await objects.health.state()
        waiting = await waiting_count(objects.queue)
        counts = await transactor.read(lambda c: c.tier_counts())
        return answer(render("store.html", counts, state=state, waiting=waiting))


def _add_nodes(router: APIRouter, transactor: Transactor) -> None:
    @router.get("/nodes")
    async def nodes(name: Text = "", page: Page = 1) -> Response:
        asked = node_rows.Asked(name=name.strip(), page=page)
        world = await _world(transactor)
        view = node_rows.nodes_page(asked, world)
        return answer(await asyncio.to_thread(render, "nodes.html", view))


def _add_events(router: APIRouter, transactor: Transactor) -> None:
    @router.get("/events")
    async def events(
        severity: Literal["", "info", "warning", "error"] = "",
        job: Text = "",
        node: Text = "",
        kind: Text = "",
        before: EventNumber = None,
    ) -> Response:
        asked = news.Asked(
            severity=severity,
            job=job.strip(),
            node=node.strip(),
            kind=kind.strip(),
            before=before,
        )

        def made(catalogue: Catalogue) -> str:
            rows = catalogue.events_like(
                news.EVENTS_PER_PAGE + 1,
                before=before,
                severities=asked.severities,
                job=asked.job,
                node=asked.node,
                kind=asked.kind,
            )
            return render("events.html", news.news(asked, rows, catalogue.now_s()))

        return answer(await transactor.read(made))


def _add_checkpoint(router: APIRouter, transactor: Transactor) -> None:
    @router.get("/jobs/{job:path}/checkpoints/{step}")
    async def checkpoint(
        job: str, step: Step, generation: Generation = None, done: str = ""
    ) -> Response:
        world = await _world(transactor)

        def made(catalogue: Catalogue) -> str:
            run = _run(catalogue, world, job)
            item, stored = users.one(catalogue, run, At(run.job, step, generation))
            line = users.line(catalogue, item.id)
            view = checkpoint_page(run, item, stored, world, line)
            return render("checkpoint.html", view, done=DONE.get(done, ""))

        return answer(await transactor.read(made))


def _add_job(router: APIRouter, transactor: Transactor) -> None:
    @router.get("/jobs/{job:path}")
    async def one_job(
        job: str,
        before: Before = None,
        before_generation: Generation = None,
        done: str = "",
        *,
        durable: bool = False,
    ) -> Response:
        if job.endswith("/"):
            return RedirectResponse(job_path(job.rstrip("/")))
        world = await _world(transactor)
        below = None if before is None else (before, before_generation or 0)

        def made(catalogue: Catalogue) -> str:
            run = _run(catalogue, world, job)
            now_s = catalogue.now_s()
            rows = catalogue.listed(
                run.id, now_s, below=below, durable=durable, limit=STEPS_PER_PAGE + 1
            )
            newest = next((row for row in run.checkpoints if run.usable(row.id)), None)
            read = Read(
                rows=rows,
                newest=catalogue.listed(run.id, now_s, limit=POINTS_COUNT_MAX),
                line=users.line(catalogue, newest.id) if newest else (),
                events=catalogue.events_like(
                    NEWS_OF_JOB, severities=WENT_WRONG, job=run.job, exactly=True
                ),
            )
            view = job_page(run, world, read, first=below is None, durable=durable)
            return render("job.html", view, done=DONE.get(done, ""))

        return answer(await transactor.read(made))
