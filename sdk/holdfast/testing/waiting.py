"""Waits of tests: for what happens, with a deadline, and with the log if it does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAIT_S_MAX = 120.0
LOG_LINES_MAX = 40
_POLL_S = 0.02


def until(happened: Callable[[], bool], what: str, *, timeout_s: float, logs: list[Path]) -> None:
    """Return once ``happened``.

    Raises:
        AssertionError: not within ``timeout_s``; the message has ``what`` and the end of ``logs``.
    """
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    while not happened():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{tails(logs)}")
        time.sleep(max(_POLL_S, 4 * (now - began)))  # who is tested needs the machine
        began = time.monotonic()


def tails(logs: list[Path]) -> str:
    """Return the last lines of each log, under its name."""
    return "\n".join(_tail(path) for path in logs)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"--- {path.name}", *lines[-LOG_LINES_MAX:]])
