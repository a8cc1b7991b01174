"""Asks a service's REST with the standard library: a deadline, and errors as they were raised.

With ``HOLDFAST_TLS`` an ``https`` address is a service of this cluster, whatever its host's name.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from functools import partial
from typing import Any

from holdfast import errors
from holdfast.errors import CheckpointError, NotFoundError, UnavailableError
from holdfast.rpc import tls

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 << 20

_BY_KIND: dict[str, type[CheckpointError]] = {
    cls.kind: cls for cls in (getattr(errors, name) for name in errors.__all__)
}


def ask(method: str, url: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> Any:
    """Return the JSON that a request is answered with; blocks.

    Raises:
        UnavailableError: no answer within ``timeout_s``, or none that makes sense.
        CheckpointError: the one that the answer names.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    try:
        request = urllib.request.Request(  # noqa: S310 - http(s) only, checked below
            url, data=data, headers=headers, method=method
        )
    except ValueError as cause:
        raise UnavailableError(f"{url} is not a web address") from cause
    if request.type not in ("http", "https"):
        raise UnavailableError(f"{url} is not a web address")
    try:
        with opener().open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(ANSWER_BYTES_MAX) or b"null")
    except urllib.error.HTTPError as cause:
        raise _problem(cause) from cause
    except (OSError, ValueError, http.client.HTTPException) as cause:
        raise UnavailableError(f"no answer from {_origin(request)}: {why(cause)}") from cause


class _Members(http.client.HTTPSConnection):
    """A connection to a member of this cluster, which is known by the cluster's name."""

    def __init__(self, host: str, identity: tls.Identity, **options: Any) -> None:
        super().__init__(host, context=identity.client, **options)
        self._identity = identity

    def connect(self) -> None:
        """Connect, and greet one another."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._identity.client.wrap_socket(self.sock, server_hostname=tls.NAME)


class _MembersHandler(urllib.request.HTTPSHandler):
    def __init__(self, identity: tls.Identity) -> None:
        super().__init__()
        self._identity = identity

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(_Members, identity=self._identity), request)


def opener() -> urllib.request.OpenerDirector:
    """Return what opens addresses of services: directly, as gRPC does, past a shell's proxy.

    Raises:
        InvalidRequestError: the folder ``HOLDFAST_TLS`` is not as it has to be.
    """
    identity = tls.identity()
    handlers = [] if identity is None else [_MembersHandler(identity)]
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


def connection(scheme: str, host: str, port: int | None, timeout_s: float) -> Any:
    """Return an ``http.client`` connection to a service; errors as ``opener``."""
    if scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    identity = tls.identity()
    if identity is None:
        return http.client.HTTPSConnection(host, port, timeout=timeout_s)
    return _Members(host, identity, port=port, timeout=timeout_s)


def why(cause: BaseException) -> str:
    """Return what an error of the standard library says, and what of ``HOLDFAST_TLS`` it may be."""
    inner = cause.reason if isinstance(cause, urllib.error.URLError) else cause
    if isinstance(inner, ssl.SSLError):
        return f"{inner}: {tls.why(inner)}"
    if isinstance(inner, http.client.BadStatusLine):  # or none at all
        return f"{inner}: perhaps it asks for TLS, see {tls.TLS}"
    return str(inner)


def _origin(request: urllib.request.Request) -> str:
    return f"{request.type}://{request.host}"


def _problem(answer: urllib.error.HTTPError) -> CheckpointError:
    """Return the error that a problem+json body names, or what the code means."""
    with answer:
        try:
            return error_of(json.loads(answer.read(ANSWER_BYTES_MAX)))
        except (OSError, ValueError, KeyError, TypeError):
            cls = NotFoundError if answer.code == 404 else UnavailableError
            return cls(f"{answer.url} answered {answer.code}")


def error_of(body: Any) -> CheckpointError:
    """Return the error that a problem+json body names.

    Raises:
        KeyError: it names none. So does a TypeError.
    """
    return _BY_KIND[body["kind"]](str(body["detail"]))


def url_of_metadata(address: str) -> str:
    """Return where the metadata service at ``address`` serves REST, without trailing slash.

    Raises:
        UnavailableError: it does not answer.
    """
    from holdfast.rpc.channel import call, sync_channel  # noqa: PLC0415 - grpc is slow to import
    from holdfast.v1 import common_pb2  # noqa: PLC0415
    from holdfast.v1.metadata_pb2_grpc import MetadataStub  # noqa: PLC0415

    with sync_channel(address) as channel:
        request = common_pb2.HandshakeRequest()
        try:
            answer = call(MetadataStub(channel).Handshake, request, timeout_s=TIMEOUT_S)
        except UnavailableError as cause:
            reason = cause.message.rpartition(": ")[2]
            raise UnavailableError(
                f"no metadata service answers at {address} ({reason}): "
                f"start it, or correct HOLDFAST_ADDRESS"
            ) from cause
    if not answer.rest_url:
        raise UnavailableError(f"the metadata service at {address} serves no REST")
    return str(answer.rest_url).rstrip("/")
