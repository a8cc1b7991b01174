"""The errors of Holdfast, grouped by what the catcher does next.

::

    CheckpointError                       .kind  .retryable  .context  .docs
    ├── InvalidRequestError (ValueError)      fix the call
    ├── NotFoundError (LookupError)           nothing there
    ├── AlreadyExistsError                    usually success of a repeat: compare digests
    ├── ConflictError                         re-read, redo the transaction
    ├── PreconditionError                     state forbids it; do not retry as is
    │   ├── NotReadyError                     shards missing; lists them
    │   └── StaleGenerationError              you were replaced: stop this attempt
    ├── ExhaustedError                        budget or quota; shed or wait
    ├── UnavailableError                      retry with backoff
    ├── OutcomeUnknownError (TimeoutError)    may have happened: read back, never retry blind
    ├── CorruptionError                       never this replica again: try another, quarantine
    │   ├── DigestMismatchError
    │   ├── TruncatedShardError
    │   └── ManifestError
    ├── StoppedError                          leave the rest to whoever goes on
    ├── UnsupportedFormatError                newer or older than we read
    ├── AccessError                           credentials or rights
    └── InternalError                         our bug

``kind`` values are append-only: they travel in gRPC metadata, problem+json, events and logs.
Each error names its place in ``docs/reference/errors.md``: tracebacks and the command line show it.
Knows nothing of gRPC or HTTP; ``holdfast.rpc.status`` holds the table to and from statuses.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "CheckpointError",
    "ConflictError",
    "CorruptionError",
    "DigestMismatchError",
    "ExhaustedError",
    "InternalError",
    "InvalidRequestError",
    "ManifestError",
    "NotFoundError",
    "NotReadyError",
    "OutcomeUnknownError",
    "PreconditionError",
    "StaleGenerationError",
    "StoppedError",
    "TruncatedShardError",
    "UnavailableError",
    "UnsupportedFormatError",
]


PAGE = "docs/reference/errors.md"


class CheckpointError(Exception):
    """Anything Holdfast refuses or fails at.

    Args:
        message: One lower-case clause with the values that matter.
        context: Ids this error concerns (``run=``, ``step=``, ``rank=`` …); kept as text.
    """

    kind: ClassVar[str] = "checkpoint"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, str] = {key: str(value) for key, value in context.items()}
        self.add_note(f"See {self.docs}")

    @property
    def docs(self) -> str:
        """Where the cause and the cure of this kind of error are written down."""
        return f"{PAGE}#{self.kind}"

    def __str__(self) -> str:
        if not self.context:
            return self.message
        ids = " ".join(f"{key}={value}" for key, value in self.context.items())
        return f"{self.message} ({ids})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.context))


def _rebuild(cls: type[CheckpointError], message: str, context: dict[str, str]) -> CheckpointError:
    return cls(message, **context)


class InvalidRequestError(CheckpointError, ValueError):
    """The call itself is wrong: fix it."""

    kind = "invalid_request"


class NotFoundError(CheckpointError, LookupError):
    """Nothing of that name is there."""

    kind = "not_found"


class AlreadyExistsError(CheckpointError):
    """Somebody made or holds it already; a repeat of one's own call is usually success."""

    kind = "already_exists"


class ConflictError(CheckpointError):
    """A concurrent writer won: read again and redo the transaction."""

    kind = "conflict"
    retryable = True


class PreconditionError(CheckpointError):
    """The state forbids it; the same call again is refused again."""

    kind = "precondition"


class NotReadyError(PreconditionError):
    """Shards are missing; the message lists them."""

    kind = "not_ready"


class StaleGenerationError(PreconditionError):
    """A newer attempt has replaced this one: stop."""

    kind = "stale_generation"


class ExhaustedError(CheckpointError):
    """A budget or quota is used up: shed load, or wait."""

    kind = "exhausted"


class UnavailableError(CheckpointError):
    """The other side cannot be reached now: retry with backoff."""

    kind = "unavailable"
    retryable = True


class OutcomeUnknownError(CheckpointError, TimeoutError):
    """It may have happened: read back before doing it again."""

    kind = "outcome_unknown"


class CorruptionError(CheckpointError):
    """These bytes are not what was sealed: never this replica again, try another."""

    kind = "corruption"


class DigestMismatchError(CorruptionError):
    """The bytes hash to something else than the owner's agent wrote down."""

    kind = "digest_mismatch"


class TruncatedShardError(CorruptionError):
    """Fewer or more bytes than the shard has."""

    kind = "truncated_shard"


class ManifestError(CorruptionError):
    """A header or manifest breaks a rule of the format; the message names the rule."""

    kind = "manifest"


class StoppedError(CheckpointError):
    """The work was told to stop before its end; what is done stays done, and is found again."""

    kind = "stopped"


class UnsupportedFormatError(CheckpointError):
    """Written by a newer, or much older, Holdfast than this one reads."""

    kind = "unsupported_format"


class AccessError(CheckpointError):
    """Credentials are missing or do not allow it."""

    kind = "access"


class InternalError(CheckpointError):
    """A bug of ours; please report it with the message."""

    kind = "internal"
