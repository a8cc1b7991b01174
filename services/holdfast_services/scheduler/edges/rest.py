"""The REST edge and the page: for people, their tools, and executors."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect

from holdfast.core.executions import ExecutorRequest
from holdfast.core.ids import job_name
from holdfast.core.job_spec import JobSpec
from holdfast.core.records import from_record, to_record
from holdfast.errors import InvalidRequestError, NotFoundError, UnavailableError
from holdfast_services.kit import rest as kit
from holdfast_services.kit.transactions import Transactions
from holdfast_services.scheduler.calls.executors import Executors
from holdfast_services.scheduler.edges import documents, page
from holdfast_services.scheduler.edges.documents import Document
from holdfast_services.scheduler.edges.figures import figures
from holdfast_services.scheduler.storage import Statements
from holdfast_services.scheduler.usecases import jobs, reading

BODY_BYTES_MAX = 8 << 20
CANCELLED = "cancelled by a user"
_CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Limit = Annotated[int, Query(ge=1, le=jobs.LISTED_MAX)]


def make_app(
    transactions: Transactions[Statements],
    executors: Executors,
    quotas: Mapping[str, int],
    names: Collection[str] = (),
) -> FastAPI:
    """Return the application; ``names`` are what browsers know it by, see ``kit.visitors``."""
    app = kit.make_app("Holdfast scheduler", names)
    _add_page(app, transactions)
    _add_jobs(app, transactions, quotas)
    _add_plan(app, transactions)
    _add_executors(app, executors)
    return app


async def _body(request: Request) -> Any:
    """Return the JSON of a request.

    Raises:
        InvalidRequestError: there is none, or too much of it.
    """
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise InvalidRequestError(f"the body is longer than {BODY_BYTES_MAX} bytes")
        return json.loads(body)
    except ClientDisconnect as cause:  # an executor had news, and asks anew
        raise UnavailableError("the caller has gone") from cause
    except (ValueError, RecursionError) as cause:
        raise InvalidRequestError(f"the body is no JSON: {cause}") from cause


def _add_page(app: FastAPI, transactions: Transactions[Statements]) -> None:
    @app.get("/", include_in_schema=False)
    async def shown() -> HTMLResponse:
        seen = await transactions.read(lambda s: reading.look(s, limit=page.OVER_SHOWN_MAX))
        return HTMLResponse(page.html(seen), headers={"Content-Security-Policy": _CSP})

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer while the process runs."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Answer while the database can be read."""
        await transactions.read(lambda s: s.lease())
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Answer with figures for Prometheus."""
        return figures(await transactions.read(lambda s: reading.look(s, limit=1)))


def _add_jobs(
    app: FastAPI, transactions: Transactions[Statements], quotas: Mapping[str, int]
) -> None:
    @app.post("/api/v1/jobs", status_code=HTTPStatus.CREATED)
    async def submit(request: Request, *, dry_run: bool = False) -> Response:
        """Take a job on; with `dry_run` only say whether it would be."""
        spec = from_record(JobSpec, await _body(request))
        made = await transactions.write(
            lambda s: jobs.submit(s, spec, secrets.token_hex(8), quotas, dry_run=dry_run)
        )
        if made.new and not dry_run:
            transactions.wake()
        document = documents.job_doc(made.job, None, made.job.submitted_at_s)
        created = made.new and not dry_run
        return JSONResponse(document, HTTPStatus.CREATED if created else HTTPStatus.OK)

    @app.get("/api/v1/jobs")
    async def listed(limit: Limit = jobs.LISTED_MAX) -> list[Document]:
        """List the jobs that live, in the queue's order, then those that are over."""
        seen = await transactions.read(lambda s: reading.look(s, limit=limit))
        return [documents.job_doc(job, seen.plan, seen.now_s) for job in (*seen.jobs, *seen.over)]

    @app.post("/api/v1/jobs/{job:path}/cancel")
    async def cancel(job: str) -> Document:
        """End a job; its ranks save once more."""
        name = job_name(job)
        changed = await transactions.write(lambda s: jobs.cancel(s, name, CANCELLED))
        transactions.wake()
        return documents.job_doc(changed, None, changed.submitted_at_s)

    @app.get("/api/v1/jobs/{job:path}")
    async def one(job: str) -> Document:
        """Show one job: what it has, and why."""
        name = job_name(job)

        def found(statements: Statements) -> Document:
            kept = jobs.find(statements, name)
            return documents.job_doc(kept.job, statements.newest_plan(), statements.now_s())

        return await transactions.read(found)

    @app.get("/api/v1/queue")
    async def queue() -> list[Document]:
        """List the jobs that wait for GPUs, who comes first, and why each waits."""
        seen = await transactions.read(reading.look)
        return [documents.job_doc(job, seen.plan, seen.now_s) for job in seen.queue]


def _add_plan(app: FastAPI, transactions: Transactions[Statements]) -> None:
    @app.get("/api/v1/plan")
    async def plan() -> Document:
        """Show the newest plan."""
        newest = await transactions.read(lambda s: s.newest_plan())
        if newest is None:
            raise NotFoundError("no plan has been made yet")
        return documents.plan_doc(newest)

    @app.get("/api/v1/nodes")
    async def nodes() -> list[Document]:
        """List the nodes, and who has their GPUs."""
        seen = await transactions.read(lambda s: reading.look(s, limit=1))
        return documents.nodes_docs(seen.cluster, seen.jobs, seen.now_s)

    @app.get("/api/v1/status")
    async def status() -> Document:
        """Say who plans, and what it hears."""
        seen = await transactions.read(lambda s: reading.look(s, limit=1))
        lease = seen.lease
        return {
            "holder": lease.holder if lease.until_s > seen.now_s else None,
            "fence": lease.fence,
            "number": lease.number,
            "metadata_out_since": lease.metadata_out_since_s or None,
            "jobs": len(seen.jobs),
            "queued": len(seen.queue),
        }


def _add_executors(app: FastAPI, executors: Executors) -> None:
    @app.post("/api/v1/executors/{node}")
    async def ask(node: str, request: Request) -> Document:
        """Take an executor's report; answer with its node's orders once they differ."""
        asked = from_record(ExecutorRequest, await _body(request))
        orders: Document = to_record(await executors.ask(node, asked))
        return orders

    @app.delete("/api/v1/executors/{node}/{executor}")
    async def leave(node: str, executor: str) -> dict[str, str]:
        """Count an executor as gone: it ends."""
        await executors.leave(node, executor)
        return {"status": "gone"}
