"""What an exit means: the user's doing, or something that another try may do without. Pure."""

from __future__ import annotations

import signal
from typing import Any

from holdfast.core.rounds import TEXT_LENGTH_MAX, RankFailure

_OUTSIDE = frozenset({"StaleGenerationError", "UnavailableError", "OutcomeUnknownError"})
"""Names of exceptions that speak of services, or of an attempt that was replaced."""

_OF_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "failed to connect",
    "Timed out waiting",
)
_OF_PEER_KINDS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})


def failure(rank: int, code: int, noted: dict[str, Any], *, step: int) -> RankFailure:
    """Return what became of a rank that exited with ``code``, minus a signal's number.

    ``noted`` is what it left of its exception: ``reason``, ``detail``, ``kind``; empty if there was
    none. ``step`` is its last one, -1: none.
    """
    if code < 0 and not noted:
        name = _signal_name(-code)
        hint = ", by the kernel if memory was short" if -code == signal.SIGKILL else ""
        reason = f"killed by {name}{hint}"
        return RankFailure(rank=rank, code=code, reason=reason, step=step, outside=True)
    reason = _plain(noted.get("reason", f"exit code {code}"))
    kind = _plain(noted.get("kind", ""))
    return RankFailure(
        rank=rank,
        code=code,
        reason=reason,
        detail=_plain(noted.get("detail", "")),
        step=step,
        outside=kind in _OUTSIDE,
        of_peer=kind in _OF_PEER_KINDS or any(words in reason for words in _OF_PEER),
    )


def _plain(text: object) -> str:
    """Return what can be sent and kept of a text: exceptions speak of any bytes."""
    sent = str(text).encode(errors="backslashreplace").decode()
    return sent.replace("\0", "\\0")[-TEXT_LENGTH_MAX:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
