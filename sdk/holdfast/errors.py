"""The errors of Holdfast, grouped by what the catcher does next.

::

    CheckpointError                       .kind  .retryable  .context  .docs
    ├── InvalidRequestError (ValueError)      fix the call
    ├── NotFoundError (LookupError)           nothing there
    ├── AlreadyExistsError                    usually success of a repeat: compare digests
    ├── ConflictError                         re-read, redo the transaction
    ├── PreconditionError                     state forbids it; do not retry as is
    │   ├── NonFiniteError                    NaN or infinity in what was to be saved; names it
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

import re
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
    "NonFiniteError",
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
FOR_PROGRAMS = frozenset({"lease_s", "signal", "valid_s"})
"""Names in a context that are no ids: whoever catches an error reckons with them."""
_WORDS = {"fqn": "tensor", "home": "folder", "pid": "process"}


class CheckpointError(Exception):
    """The base class of all errors of Holdfast.

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
        """The section of the documentation with the cause and the cure of this kind of error."""
        return f"{PAGE}#{self.kind}"

    def __str__(self) -> str:
        """Return the message, with the ids that it does not name itself."""
        missing = [
            f"{_WORDS.get(name, name)} {value}"
            for name, value in self.context.items()
            if name not in FOR_PROGRAMS and not _is_named(name, value, self.message)
        ]
        return f"{self.message} ({', '.join(missing)})" if missing else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.context))


def _is_named(name: str, value: str, message: str) -> bool:
    """Tell whether a message has an id; of a number only after its word, as it may be another's."""
    said = f"{name} {value}" if value.isdecimal() else value
    return re.search(rf"(?<!\w){re.escape(said)}(?!\w)", message) is not None


def _rebuild(cls: type[CheckpointError], message: str, context: dict[str, str]) -> CheckpointError:
    return cls(message, **context)


class InvalidRequestError(CheckpointError, ValueError):
    """The call has a value that Holdfast cannot use: change the call."""

    kind = "invalid_request"


class NotFoundError(CheckpointError, LookupError):
    """The named job, step, stack or object does not exist."""

    kind = "not_found"


class AlreadyExistsError(CheckpointError):
    """Another process made or holds the object already, or an earlier call of your own did."""

    kind = "already_exists"


class ConflictError(CheckpointError):
    """Another writer changed the same thing: read again and repeat the call."""

    kind = "conflict"
    retryable = True


class PreconditionError(CheckpointError):
    """The present state does not allow the call; repeating it does not help."""

    kind = "precondition"


class NonFiniteError(PreconditionError):
    """What was to be saved holds a NaN or an infinity; the message names the tensors."""

    kind = "non_finite"


class NotReadyError(PreconditionError):
    """Shards or tensors are missing; the message lists them."""

    kind = "not_ready"


class StaleGenerationError(PreconditionError):
    """A newer attempt has replaced this one: stop this attempt."""

    kind = "stale_generation"


class ExhaustedError(CheckpointError):
    """A budget or quota is used up: raise it, free memory, or wait."""

    kind = "exhausted"


class UnavailableError(CheckpointError):
    """A service cannot be reached now: try again with growing waits."""

    kind = "unavailable"
    retryable = True


class OutcomeUnknownError(CheckpointError, TimeoutError):
    """The call may or may not have succeeded: look before you repeat it."""

    kind = "outcome_unknown"


class CorruptionError(CheckpointError):
    """Stored bytes differ from the saved ones: use another copy, never this one again."""

    kind = "corruption"


class DigestMismatchError(CorruptionError):
    """The bytes do not match the digest that was computed when they were saved."""

    kind = "digest_mismatch"


class TruncatedShardError(CorruptionError):
    """The shard has fewer or more bytes than it should have."""

    kind = "truncated_shard"


class ManifestError(CorruptionError):
    """A header or manifest breaks a rule of the format; the message names the rule."""

    kind = "manifest"


class StoppedError(CheckpointError):
    """The work was told to stop before its end; what is done stays done, and is found again."""

    kind = "stopped"


class UnsupportedFormatError(CheckpointError):
    """A newer, or much older, Holdfast wrote the bytes or sent the message."""

    kind = "unsupported_format"


class AccessError(CheckpointError):
    """Credentials are missing or do not allow the call."""

    kind = "access"


class InternalError(CheckpointError):
    """Holdfast has a bug; please report it with the message."""

    kind = "internal"
