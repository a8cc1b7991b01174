"""Asks a service's REST with the standard library: a deadline, and errors as they were raised."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from holdfast import errors
from holdfast.errors import CheckpointError, NotFoundError, UnavailableError

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
    # Services are reached directly, as gRPC does: a proxy of the shell is not for them.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(ANSWER_BYTES_MAX) or b"null")
    except urllib.error.HTTPError as cause:
        raise _problem(cause) from cause
    except (OSError, ValueError) as cause:
        raise UnavailableError(f"no answer from {_origin(request)}: {cause}") from cause


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
