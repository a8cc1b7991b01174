"""A REST server whose edge is one place: who may ask, and errors as ``application/problem+json``.

Handlers raise ``CheckpointError``s and know no codes. Anything else that escapes a handler is a
bug: it is logged, and answered as 500.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import holdfast
from holdfast.errors import (
    AccessError,
    CheckpointError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.rpc import tls
from holdfast.rpc.status import http_code
from holdfast_services.kit.api_page import POLICY, api_page
from holdfast_services.kit.visitors import refusal

PROBLEM = "application/problem+json"
GRACE_S = 2.0


class Problem(BaseModel):
    """What is answered where something is wrong, after RFC 9457."""

    type: str = Field(description="`urn:holdfast:error:` and the kind")
    title: str
    status: int
    detail: str = Field(description="What is wrong, with the values that matter")
    kind: str = Field(description="Stable: see the page of errors")
    instance: str = Field(description="The path that was asked for")
    context: dict[str, str] = Field(default={}, description="What it is about: job, run, step …")


class _App(FastAPI):
    """Describes what is answered here: no request is refused with FastAPI's own 422."""

    def openapi(self) -> dict[str, Any]:
        """Return the description."""
        fresh = self.openapi_schema is None
        described = super().openapi()
        if fresh:
            for operations in described["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            schemas = described.get("components", {}).get("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return described


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "It was not done, or nobody knows: `kind` says which",
        "content": {PROBLEM: {"schema": Problem.model_json_schema()}},
    }
}


def make_app(title: str, names: Collection[str]) -> FastAPI:
    """Return an application that describes itself at ``/docs``, and has no other path.

    ``names`` are what browsers know it by besides this machine's own; see ``visitors``.
    """

    def known(request: Request) -> None:
        reason = refusal(
            host=request.headers.get("host", ""),
            origin=request.headers.get("origin"),
            reached=(request.scope.get("server") or ("",))[0],
            names=names,
        )
        if reason:
            raise AccessError(reason)

    app = _App(
        title=title,
        version=holdfast.__version__,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(known)],
        responses=_PROBLEMS,
    )
    app.add_exception_handler(CheckpointError, _problem)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, _failed)

    @app.get("/docs", include_in_schema=False)
    async def described() -> Response:
        policy = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(api_page(app.openapi()), headers=policy)

    return app


async def _problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, CheckpointError):
        raise error
    return _answer(request, error, http_code(error))


def _answer(
    request: Request, error: CheckpointError, code: int, headers: Mapping[str, str] | None = None
) -> Response:
    body = {
        "type": f"urn:holdfast:error:{error.kind}",
        "title": error.kind.replace("_", " "),
        "status": code,
        "detail": error.message,
        "kind": error.kind,
        "instance": request.url.path,
        **({"context": error.context} if error.context else {}),
    }
    return JSONResponse(body, status_code=code, headers=headers, media_type=PROBLEM)


async def _malformed(request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    where = ".".join(map(str, first.get("loc", ())))
    return await _problem(request, InvalidRequestError(f"{where}: {first.get('msg', 'malformed')}"))


async def unrouted(request: Request, error: Exception) -> Response:
    """Answer what no route serves, or not by this method."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return await _problem(request, NotFoundError(f"nothing is at {request.url.path}"))
    reason = InvalidRequestError(f"{request.method} is not served here")
    return _answer(request, reason, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A bug; the server logs the exception, which is raised to it all the same."""
    del error
    return await _problem(request, InternalError("unexpected failure; see the service's log"))


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: the runner owns signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _following(identity: tls.Identity) -> ssl.SSLContext:
    """Return a context for a server; each handshake is made with what the files say by then."""

    def newer(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        now = tls.identity()
        if now is not None:
            connection.context = now.server

    identity.server.sni_callback = newer
    return identity.server


class RestServer:
    """A port, bound at once, and from ``begin`` to ``end`` an application that is served on it.

    ``url`` is where others reach it: with ``HOLDFAST_TLS`` by ``https``, and whoever asks must show
    a certificate of its CA.
    """

    def __init__(self, listen: str) -> None:
        self._socket = bind(listen)
        host, port = self._socket.getsockname()[:2]
        self._identity = tls.identity()
        self.url = f"{tls.scheme()}://{reachable(host)}:{port}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def begin(self, app: FastAPI) -> None:
        """Return once the application is served.

        Raises:
            UnavailableError: another process has bound the port too, and was first to listen there.
        """
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(GRACE_S),
        )
        config.load()
        if self._identity is not None:
            config.ssl = _following(self._identity)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        if self._serving.done():
            serving, self._serving = self._serving, None
            try:
                await serving
            except OSError as cause:
                self._socket.close()
                raise UnavailableError(f"cannot listen on {self.url}: {cause.strerror}") from cause

    def close(self) -> None:
        """Take no more requests; those that are being answered have ``GRACE_S``."""
        if self._server:
            self._server.should_exit = True

    async def ended(self) -> None:
        """Return once all that was asked has been answered, or its time is over."""
        if self._serving:
            await self._serving


def bind(listen: str) -> socket.socket:
    """Return a bound socket, so that the port is known before anybody is told of it.

    Raises:
        InvalidRequestError: ``listen`` is no ``host:port``.
        UnavailableError: the port is taken.
    """
    host, port = host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except (OSError, UnicodeError) as cause:  # the latter of a label that no name can have
        bound.close()
        why = cause.strerror if isinstance(cause, OSError) else cause
        raise UnavailableError(f"cannot listen on {listen}: {why}") from cause
    return bound


def reachable(host: str) -> str:
    """Return a name under which others reach this host: a wildcard is nobody's address."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]") else host  # noqa: S104


def host_port(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; port 0 means any free one.

    Raises:
        InvalidRequestError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise InvalidRequestError(f"address {text!r} is not host:port")
    return host, int(port)
