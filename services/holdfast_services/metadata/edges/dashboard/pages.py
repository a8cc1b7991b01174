"""From a view to an answer: templates that escape, headers that let nothing else in, errors.

Templates and assets are files of this package. Assets are served by their names here alone, each
under an address that changes with its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException

import holdfast
from holdfast.errors import CheckpointError, NotFoundError
from holdfast.rpc.status import http_code
from holdfast_services.kit import rest as kit

ASSETS: Mapping[str, str] = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "htmx-2.0.10.min.js": "text/javascript",
    "uPlot-1.6.32.iife.min.js": "text/javascript",
    "uPlot-1.6.32.min.css": "text/css",
}
"""What the pages load, and its media type."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": a form would be sent with the Origin "null", which is refused.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ADDRESS_LENGTH_MAX = 200
A_YEAR = "public, max-age=31536000, immutable"


def render(template: str, view: object, **more: object) -> str:
    """Return a page; a template sees the view as ``view``, and the rest by name."""
    return _environment().get_template(template).render(view=view, **more)


def answer(html: str, status: int = HTTPStatus.OK) -> Response:
    """Return a page as an answer."""
    return HTMLResponse(html, status_code=status, headers=dict(HEADERS))


def asset(name: str, digest: str = "") -> Response:
    """Return one of ``ASSETS``; kept for a year if ``digest``, of its address, is that of this one.

    A page of another version may ask for what this process has not.

    Raises:
        NotFoundError: there is none of that name.
    """
    if name not in ASSETS:
        raise NotFoundError(f"no asset {name[:80]!r}")
    kept = A_YEAR if digest == _digest(name) else "no-cache"
    headers = {"Cache-Control": kept, "X-Content-Type-Options": "nosniff"}
    return Response(_body(name), media_type=ASSETS[name], headers=headers)


@lru_cache(len(ASSETS))
def _body(name: str) -> bytes:
    return (files(__package__) / "assets" / name).read_bytes()


@lru_cache(len(ASSETS))
def _digest(name: str) -> str:
    return hashlib.sha256(_body(name)).hexdigest()[:12]


def _asset_path(name: str) -> str:
    return f"/assets/{name}?v={_digest(name)}"


@lru_cache(1)
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.globals |= {"asset": _asset_path, "version": holdfast.__version__}
    return found


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """A route whose errors are pages: what people see when the catalogue does not answer.

    What is asked for by GET is by HEAD, too.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Take what ``APIRoute`` takes."""
        super().__init__(path, endpoint, **options)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")

    def get_route_handler(self) -> Handler:
        """Return the handler with errors of ours, and of what was asked, turned into pages."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except CheckpointError as error:
                return _failed(error.kind, error.message, http_code(error))
            except RequestValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first.get("loc", ())))
                text = f"{where}: {first.get('msg', 'malformed')}"
                return _failed("invalid_request", text, HTTPStatus.UNPROCESSABLE_ENTITY)

        return handle


async def unrouted(request: Request, error: Exception) -> Response:
    """Answer what no route serves: a browser with a page, others as the rest of REST does."""
    html = "text/html" in request.headers.get("accept", "")
    if html and isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        text = f"nothing is at {request.url.path[:ADDRESS_LENGTH_MAX]}"
        return _failed(NotFoundError.kind, text, HTTPStatus.NOT_FOUND)
    return await kit.unrouted(request, error)


def _failed(kind: str, message: str, status: int) -> Response:
    title = kind.replace("_", " ")
    return answer(render("error.html", None, title=title, message=message, kind=kind), status)
