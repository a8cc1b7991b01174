"""A thread that does one thing at a time, and whose end is waited for: here, saves."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable

from holdfast.errors import OutcomeUnknownError
from holdfast.logs import steady_logger

EXIT_S_MAX = 300.0
"""How long the interpreter waits at its end for a save that is under way."""

log = steady_logger(__name__)

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Background:
    """Does what ``begin`` is given on a thread of its own, one thing at a time.

    The interpreter does not end before it is done, or ``EXIT_S_MAX`` have passed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something was begun whose end was not waited for."""
        return self._thread is not None

    @property
    def failure(self) -> Exception | None:
        """What the last thing that has ended has raised."""
        return self._failure

    def take_failure(self) -> Exception | None:
        """Return ``failure``, and forget it."""
        failure, self._failure = self._failure, None
        return failure

    def begin(self, what: str, job: Callable[[], None]) -> None:
        """Do ``job`` in the background; ``settle`` was called before.

        What it raises is logged, kept in ``failure``, and ends there.
        """
        assert self._thread is None, "one thing at a time"
        self._thread = threading.Thread(
            target=self._run, args=(what, job), name=self._name, daemon=True
        )
        _threads.add(self._thread)
        self._thread.start()

    def settle(self, deadline_s: float) -> None:
        """Return once nothing is under way.

        Raises:
            OutcomeUnknownError: something still is after ``deadline_s``.
        """
        if self._thread is None:
            return
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise OutcomeUnknownError(f"a save is not done after {deadline_s:.0f} s")
        self._thread = None

    def _run(self, what: str, job: Callable[[], None]) -> None:
        try:
            job()
            self._failure = None
        except Exception as failure:  # noqa: BLE001 - the edge of the thread
            self._failure = failure
            log.warning("%s failed, training goes on: %s", what, failure)


def _join_all() -> None:
    deadline_s = time.monotonic() + EXIT_S_MAX
    for thread in list(_threads):
        thread.join(max(deadline_s - time.monotonic(), 0.0))


def _at_exit(call: Callable[[], None]) -> None:
    """Have the interpreter call before it ends the pools that threads need.

    What ``atexit`` calls comes too late: by then no pool of threads takes anything.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending already
            register(call)


_at_exit(_join_all)  # once: what is registered stays for as long as the process lives
