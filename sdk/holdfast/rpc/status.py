"""The one table of errors to gRPC statuses and HTTP codes, used in both directions.

On the wire an error is a status plus a ``holdfast-error-bin`` trailer (``ErrorDetail``) that
carries ``kind`` and context; without the trailer (a proxy, another server) the status alone
decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import grpc
from google.protobuf.message import DecodeError

from holdfast import errors
from holdfast.rpc import tls
from holdfast.v1 import common_pb2 as pb

TRAILER = "holdfast-error-bin"
MESSAGE_LENGTH_MAX = 1_500
CONTEXT_COUNT_MAX = 16
VALUE_LENGTH_MAX = 200

_CODE = grpc.StatusCode

STATUS: dict[type[errors.CheckpointError], tuple[grpc.StatusCode, int]] = {
    errors.InvalidRequestError: (_CODE.INVALID_ARGUMENT, 400),
    errors.NotFoundError: (_CODE.NOT_FOUND, 404),
    errors.AlreadyExistsError: (_CODE.ALREADY_EXISTS, 409),
    errors.ConflictError: (_CODE.ABORTED, 409),
    errors.PreconditionError: (_CODE.FAILED_PRECONDITION, 412),
    errors.NonFiniteError: (_CODE.FAILED_PRECONDITION, 412),
    errors.NotReadyError: (_CODE.FAILED_PRECONDITION, 412),
    errors.StaleGenerationError: (_CODE.FAILED_PRECONDITION, 412),
    errors.ExhaustedError: (_CODE.RESOURCE_EXHAUSTED, 429),
    errors.UnavailableError: (_CODE.UNAVAILABLE, 503),
    errors.OutcomeUnknownError: (_CODE.DEADLINE_EXCEEDED, 504),
    errors.CorruptionError: (_CODE.DATA_LOSS, 500),
    errors.DigestMismatchError: (_CODE.DATA_LOSS, 500),
    errors.TruncatedShardError: (_CODE.DATA_LOSS, 500),
    errors.ManifestError: (_CODE.DATA_LOSS, 500),
    errors.StoppedError: (_CODE.UNAVAILABLE, 503),
    errors.UnsupportedFormatError: (_CODE.UNIMPLEMENTED, 501),
    errors.AccessError: (_CODE.PERMISSION_DENIED, 403),
    errors.InternalError: (_CODE.INTERNAL, 500),
}
"""Error class -> (gRPC status, HTTP code); the first class of a status is its way back."""

_BY_KIND = {error.kind: error for error in STATUS}
_BY_CODE = {code: error for error, (code, _) in reversed(STATUS.items())} | {
    _CODE.UNAUTHENTICATED: errors.AccessError,
    _CODE.CANCELLED: errors.UnavailableError,
}


def to_status(error: errors.CheckpointError) -> tuple[grpc.StatusCode, pb.ErrorDetail]:
    """Return the status and the trailer of ``error``, cut to what gRPC metadata can carry."""
    context = list(error.context.items())[:CONTEXT_COUNT_MAX]
    detail = pb.ErrorDetail(
        kind=error.kind,
        message=_cut(error.message, MESSAGE_LENGTH_MAX),
        context={key: _cut(value, VALUE_LENGTH_MAX) for key, value in context},
    )
    return _codes(error)[0], detail


def http_code(error: errors.CheckpointError) -> int:
    """Return the HTTP code of ``error``."""
    return _codes(error)[1]


def from_rpc_error(error: grpc.RpcError, **context: object) -> errors.CheckpointError:
    """Return the error that the other side raised, or what its status means.

    Args:
        error: As raised by a stub, sync or async.
        context: What the caller knows, added where the other side was silent.
    """
    outcome: object = error
    if not isinstance(outcome, _Outcome):
        return errors.InternalError(_first_line(str(error)), **context)
    cls = _BY_CODE.get(outcome.code(), errors.InternalError)
    detail = _detail(outcome.trailing_metadata())
    if detail is None:
        said = _first_line(outcome.details() or outcome.code().name)
        why = tls.reason(said) if cls is errors.UnavailableError else ""
        return cls(f"{said}: {why}" if why else said, **context)
    cls = _BY_KIND.get(detail.kind, cls)
    return cls(detail.message, **{**context, **detail.context})


@runtime_checkable
class _Outcome(Protocol):
    """What sync and async call errors share; grpc gives them no common class."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def _detail(trailer: Iterable[tuple[str, str | bytes]] | None) -> pb.ErrorDetail | None:
    for key, value in trailer or ():
        if key == TRAILER and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _codes(error: errors.CheckpointError) -> tuple[grpc.StatusCode, int]:
    known = (STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    return next(known, (_CODE.INTERNAL, 500))


def _cut(text: str, length_max: int) -> str:
    shown = text if len(text) <= length_max else text[: length_max - 1] + "…"
    return shown.encode(errors="replace").decode()


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0].lower()
