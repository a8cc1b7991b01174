"""Asks the API server: lists, makes, changes and deletes objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import kopf

from holdfast.errors import (
    AccessError,
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast_services.operator.domain.names import GROUP, PLURAL, VERSION, Document

CALL_S_MAX = 30.0
PAGE_COUNT = 500
"""Objects in one answer to a listing."""
PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"

_ERRORS: Mapping[int, type[CheckpointError]] = {
    400: InvalidRequestError,
    403: AccessError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequestError,
    422: InvalidRequestError,
}


def log_in(url: str) -> kopf.ConnectionInfo:
    """Return how to reach the API server: at ``url``, else as the pod's account or kubeconfig say.

    Raises:
        AccessError: neither is there.
    """
    if url:
        return kopf.ConnectionInfo(server=url)
    settings = kopf.OperatorSettings()
    account = kopf.login_with_service_account(settings=settings)
    info = account or kopf.login_with_kubeconfig(settings=settings)
    if info is None:
        raise AccessError("no service account of Kubernetes and no kubeconfig is here")
    return info


def path_of(namespace: str, plural: str, name: str = "") -> str:
    """Return the path of an object, or of all of a kind in a namespace."""
    root = f"/apis/{GROUP}/{VERSION}" if plural == PLURAL else "/api/v1"
    return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


class Kubernetes:
    """The API server; ``close`` after.

    All calls raise:

    * NotFoundError, AlreadyExistsError, ConflictError, InvalidRequestError: as the server says;
    * AccessError: it does not allow that;
    * UnavailableError: it does not answer, or not to us; what was asked may have been done.

    Args:
        log_in: Says how to reach it; asked anew when credentials have run out.
    """

    def __init__(self, log_in: Callable[[], kopf.ConnectionInfo]) -> None:
        self._log_in = log_in
        self._session: aiohttp.ClientSession | None = None
        self._info: kopf.ConnectionInfo | None = None

    async def close(self) -> None:
        """Let go of connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def list(self, path: str, selector: str = "") -> list[Document]:
        """Return all objects of a kind, those that labels select, as they are now."""
        found: list[Document] = []
        position = ""
        while True:
            query = {"labelSelector": selector, "limit": str(PAGE_COUNT), "continue": position}
            answer = await self._ask("GET", path, {k: v for k, v in query.items() if v})
            found += answer["items"]
            position = (answer.get("metadata") or {}).get("continue") or ""
            if not position:
                return found

    async def get(self, path: str) -> Document:
        """Return an object."""
        found: Document = await self._ask("GET", path)
        return found

    async def create(self, path: str, body: Document) -> Document:
        """Make an object; return it as it is now."""
        try:
            made: Document = await self._ask("POST", path, body=body)
        except ConflictError as error:
            raise AlreadyExistsError(error.message) from error
        return made

    async def patch(self, path: str, change: Document) -> Document:
        """Merge a change into an object; None takes a field away."""
        made: Document = await self._ask("PATCH", path, body=change)
        return made

    async def delete(self, path: str) -> None:
        """Have an object end, after its grace."""
        await self._ask("DELETE", path)

    async def _ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None
    ) -> Any:
        status, text = await self._answer(method, path, query, body)
        if status == HTTPStatus.UNAUTHORIZED:  # the token of an account is changed every hour
            await self._renew()
            status, text = await self._answer(method, path, query, body)
        if status >= HTTPStatus.BAD_REQUEST:
            raise _error(status, f"{method} {path}", text)
        try:
            return json.loads(text)
        except ValueError as cause:
            raise UnavailableError(f"{method} {path} was not answered with JSON") from cause

    async def _answer(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any
    ) -> tuple[int, str]:
        session, server = self._open()
        kind = "merge-patch+json" if method == "PATCH" else "json"
        headers = {"Accept": "application/json", "Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body)
        try:
            async with session.request(
                method, server + path, params=query, data=data, headers=headers
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
            raise UnavailableError(
                f"no answer from Kubernetes to {method} {path}: {cause}"
            ) from cause

    async def _renew(self) -> None:
        """Log in anew, if that is another account or token; other calls may have done so."""
        if self._info is not None and self._log_in() != self._info:
            await self.close()

    def _open(self) -> tuple[aiohttp.ClientSession, str]:
        """Return connections, and where they lead to: a server may be below a path of another."""
        if self._session is None or self._info is None:
            info = self._info = self._log_in()
            secure = info.server.startswith("https:")
            self._session = aiohttp.ClientSession(
                headers=info.as_http_headers(),
                connector=aiohttp.TCPConnector(ssl=info.as_ssl_context() if secure else True),
                timeout=aiohttp.ClientTimeout(total=CALL_S_MAX),
            )
        return self._session, self._info.server.rstrip("/")


def _error(status: int, what: str, text: str) -> CheckpointError:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{what} was answered with {status}"
    return _ERRORS.get(status, UnavailableError)(f"Kubernetes: {message}")
