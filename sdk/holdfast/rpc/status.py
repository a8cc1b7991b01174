"""The one table of errors to gRPC statuses and HTTP codes, used in both directions.

On the wire an error is a status plus a ``holdfast-error-bin`` trailer (``ErrorDetail``) that
carries ``kind`` and context; without the trailer (a proxy, another server) the status alone
decides.
"""

from __future__ import annotations

import grpc

from holdfast import errors
from holdfast.v1 import common_pb2 as pb

TRAILER = "holdfast-error-bin"

_CODE = grpc.StatusCode

STATUS: dict[type[errors.CheckpointError], tuple[grpc.StatusCode, int]] = {
    errors.InvalidRequestError: (_CODE.INVALID_ARGUMENT, 400),
    errors.NotFoundError: (_CODE.NOT_FOUND, 404),
    errors.AlreadyExistsError: (_CODE.ALREADY_EXISTS, 409),
    errors.ConflictError: (_CODE.ABORTED, 409),
    errors.PreconditionError: (_CODE.FAILED_PRECONDITION, 412),
    errors.NotReadyError: (_CODE.FAILED_PRECONDITION, 412),
    errors.StaleGenerationError: (_CODE.FAILED_PRECONDITION, 412),
    errors.ExhaustedError: (_CODE.RESOURCE_EXHAUSTED, 429),
    errors.UnavailableError: (_CODE.UNAVAILABLE, 503),
    errors.OutcomeUnknownError: (_CODE.DEADLINE_EXCEEDED, 504),
    errors.CorruptionError: (_CODE.DATA_LOSS, 500),
    errors.DigestMismatchError: (_CODE.DATA_LOSS, 500),
    errors.TruncatedShardError: (_CODE.DATA_LOSS, 500),
    errors.ManifestError: (_CODE.DATA_LOSS, 500),
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
    """Return the status and the trailer of ``error``."""
    code = STATUS.get(type(error), (_CODE.INTERNAL, 500))[0]
    detail = pb.ErrorDetail(kind=error.kind, message=error.message, context=error.context)
    return code, detail


def http_code(error: errors.CheckpointError) -> int:
    """Return the HTTP code of ``error``."""
    return STATUS.get(type(error), (_CODE.INTERNAL, 500))[1]


def from_rpc_error(error: grpc.RpcError, **context: object) -> errors.CheckpointError:
    """Return the error that the other side raised, or what its status means.

    Args:
        error: As raised by a stub.
        context: What the caller knows, added where the other side was silent.
    """
    code = error.code() if isinstance(error, grpc.Call) else _CODE.UNKNOWN
    for key, value in (error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else ():
        if key == TRAILER and isinstance(value, bytes):
            detail = pb.ErrorDetail.FromString(value)
            cls = _BY_KIND.get(detail.kind, errors.InternalError)
            return cls(detail.message, **{**{k: str(v) for k, v in context.items()}, **detail.context})
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    cls = _BY_CODE.get(code, errors.InternalError)
    return cls(str(details or code.name).splitlines()[0].lower(), **context)
