"""Asks the scheduler, over its REST: as a user with jobs, and as the executors of nodes."""

from __future__ import annotations

import json
import ssl
import urllib.parse
from typing import Any

import aiohttp

from holdfast.core.executions import ExecutorRequest, Orders
from holdfast.core.job_spec import JobSpec
from holdfast.core.records import from_record, to_record
from holdfast.errors import CheckpointError, NotFoundError, PreconditionError, UnavailableError
from holdfast.rpc import tls
from holdfast.rpc.rest import error_of
from holdfast_services.operator.domain.names import Document

CALL_S_MAX = 10.0


class Scheduler:
    """The scheduler at ``url``; ``close`` after.

    All calls raise UnavailableError if it does not answer, else what it answers with.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/v1"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def submit(self, spec: JobSpec) -> Document:
        """Have a job taken on; return what is known of it."""
        made: Document = await self._ask("POST", "/jobs", to_record(spec))
        return made

    async def jobs(self) -> dict[str, Document]:
        """Return all jobs that are not over, by name; and perhaps others."""
        return {one["job"]: one for one in await self._ask("GET", "/jobs?limit=1")}

    async def job(self, name: str) -> Document | None:
        """Return a job; None: there is none."""
        try:
            found: Document = await self._ask("GET", f"/jobs/{urllib.parse.quote(name)}")
        except NotFoundError:
            return None
        return found

    async def cancel(self, name: str) -> None:
        """Have a job end; one that is over, or that is not there, has ended."""
        try:
            await self._ask("POST", f"/jobs/{urllib.parse.quote(name)}/cancel")
        except (NotFoundError, PreconditionError):
            return

    async def orders(self, node: str, request: ExecutorRequest) -> Orders:
        """Say a node's report; return its orders once they differ, or after ``wait_s``."""
        path = f"/executors/{urllib.parse.quote(node)}"
        answer = await self._ask("POST", path, to_record(request), request.wait_s)
        return from_record(Orders, answer, "orders")

    async def leave(self, node: str, executor: str) -> None:
        """Say that nobody speaks for a node any more."""
        await self._ask("DELETE", f"/executors/{urllib.parse.quote(node)}/{executor}")

    async def _ask(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> Any:
        if self._session is None:
            # Each node waits for its orders on a connection.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        data = None if body is None else json.dumps(body)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        bound = aiohttp.ClientTimeout(total=wait_s + CALL_S_MAX)
        shown = _shown(self._url)
        try:
            async with self._session.request(
                method, f"{self._url}{path}", data=data, headers=headers, timeout=bound, **shown
            ) as answer:
                document = json.loads(await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
            raise UnavailableError(
                f"no answer from the scheduler at {self._url}: {_why(cause)}"
            ) from cause
        if answer.ok:
            return document
        raise _error(answer.status, document)


def _why(cause: Exception) -> str:
    """Return what an error of aiohttp says, and what of ``HOLDFAST_TLS`` it may be."""
    inner = getattr(cause, "certificate_error", None) or getattr(cause, "os_error", cause)
    if isinstance(inner, ssl.SSLError):
        return f"{cause}: {tls.why(inner)}"
    if isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientResponseError):
        return f"{cause}: perhaps it asks for TLS, see {tls.TLS}"
    return str(cause)


def _shown(url: str) -> dict[str, Any]:
    """Return what a request shows of this process, and by which name it knows the scheduler."""
    identity = tls.identity() if url.startswith("https:") else None
    return {} if identity is None else {"ssl": identity.client, "server_hostname": tls.NAME}


def _error(status: int, document: Any) -> CheckpointError:
    try:
        return error_of(document)
    except (KeyError, TypeError):
        return UnavailableError(f"the scheduler answered {status}")
