"""What an S3 server or the way to it refuses, as an error of ours, and whether to try again.

A table, not a policy: ``client`` decides how often. Messages hold codes, bucket and key, never
credentials or signed URLs.
"""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    InvalidConfigError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from urllib3.exceptions import HTTPError

from holdfast.errors import (
    AccessError,
    AlreadyExistsError,
    CheckpointError,
    DigestMismatchError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)

Failure = (ClientError, BotoCoreError, HTTPError, OSError)

# "400": the answer to HEAD has no body; Amazon says so that a token has expired.
EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired",
     "TokenRefreshRequired", "400"}
)  # fmt: skip
_DAMAGED = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_PASSING = frozenset(
    {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown",
     "ThrottlingException", "Throttling", "TooManyRequests", "ConditionalRequestConflict"}
)  # fmt: skip
_FULL = frozenset(
    {"InsufficientStorage", "InsufficientCapacity", "QuotaExceeded", "XMinioStorageFull",
     "XMinioAdminBucketQuotaExceeded"}
)  # fmt: skip
_CANNOT = frozenset(
    {"EntityTooSmall", "InvalidPart", "InvalidPartOrder", "InvalidRange", "MethodNotAllowed",
     "NotImplemented"}
)  # fmt: skip

_Row = tuple[frozenset[str], tuple[int, ...], type[CheckpointError], str]
# The first row that fits, by code or by status, says what it is.
_TABLE: tuple[_Row, ...] = (
    (frozenset({"NoSuchBucket"}), (), NotFoundError, "there is no bucket {bucket!r}"),
    (frozenset({"NoSuchUpload"}), (), NotFoundError, "no such upload: it has ended"),
    (EXPIRED, (), AccessError, "the credentials have expired: {said}"),
    (frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch"}), (), AccessError,
     "the credentials are wrong: {said}"),
    (frozenset({"RequestTimeTooSkewed"}), (), AccessError, "this machine's clock is off: {said}"),
    (_FULL, (507,), ExhaustedError, "the store is full: {said}"),
    (_DAMAGED, (), DigestMismatchError, "the bytes arrived damaged: {said}"),
    (frozenset({"PreconditionFailed"}), (412,), AlreadyExistsError,
     "there is an object of that name"),
    (_CANNOT, (405, 416, 501), PreconditionError, "the store cannot: {said}"),
    (_PASSING, (429,), UnavailableError, "the store answers {said}"),
    (frozenset(), (401, 403), AccessError, "the store does not allow it: {said}"),
    (frozenset(), (404,), NotFoundError, "nothing of that name: {said}"),
    (frozenset(), tuple(range(500, 600)), UnavailableError, "the store answers {said}"),
)  # fmt: skip

_NO_CREDENTIALS = (
    CredentialRetrievalError, InvalidConfigError, NoCredentialsError, PartialCredentialsError,
    ProfileNotFound, SSOError, TokenRetrievalError,
)  # fmt: skip
_NOT_SENT = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


def code(error: BaseException | None) -> str:
    """Return the server's code, or the status where it has no body; empty if it did not answer."""
    return error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""


def status(error: BaseException | None) -> int:
    """Return the HTTP status; 0 if the server did not answer."""
    if not isinstance(error, ClientError):
        return 0
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


def one_of_many(kind: str, text: str) -> ClientError:
    """Return the failure of one object among many in a request that itself succeeded."""
    at = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503}.get(kind, 400)
    return ClientError(
        {
            "Error": {"Code": kind, "Message": text},
            "ResponseMetadata": {"HTTPStatusCode": at},  # type: ignore[typeddict-item]
        },
        "DeleteObjects",
    )


def is_passing(error: Exception) -> bool:
    """Return whether the same request may succeed a little later."""
    if isinstance(error, ClientError):
        return code(error) in _PASSING | _DAMAGED or status(error) in (429, 500, 502, 503, 504)
    if isinstance(error, (SSLError, *_NO_CREDENTIALS)):
        return False
    return isinstance(error, HTTPClientError | IncompleteReadError | HTTPError | OSError)


def is_refusal(error: Exception) -> bool:
    """Return whether it is certain that the request has changed nothing."""
    if isinstance(error, ClientError):
        return status(error) < 500 or code(error) == "SlowDown"
    return isinstance(error, (SSLError, *_NO_CREDENTIALS, *_NOT_SENT))


def mapped(error: Exception, *, bucket: str, key: str, endpoint: str = "") -> CheckpointError:
    """Return ``error`` as a Holdfast error; ``endpoint`` is who was asked, empty for Amazon."""
    context = {"bucket": bucket, **({"key": key} if key else {})}
    if isinstance(error, ClientError):
        return _refused(error, context)
    if isinstance(error, _NO_CREDENTIALS):
        return AccessError(f"no credentials to use: {error}", **context)
    if isinstance(error, SSLError):
        return UnavailableError(f"no trust in the store's certificate: {error}", **context)
    place = f" at {endpoint}" if endpoint else ""
    return UnavailableError(f"the store{place} does not answer: {_plain(error)}", **context)


def _plain(error: Exception) -> str:
    """Return the kind of error only: its text may hold the whole signed request."""
    return type(error).__name__


def _refused(error: ClientError, context: dict[str, str]) -> CheckpointError:
    kind, at = code(error), status(error)
    said = f"{kind or at} to {error.operation_name}"
    for kinds, statuses, ours, text in _TABLE:
        if kind in kinds or at in statuses:
            return ours(text.format(said=said, bucket=context["bucket"]), **context)
    text = error.response["Error"].get("Message", "")[:200]
    return InvalidRequestError(f"the store refuses the request: {said}: {text}", **context)
