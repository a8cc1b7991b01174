"""SIGTERM and SIGINT as a wish for one more save.

The handler only notes the time; ``Checkpointer.step`` consumes it. When all is saved, or the
grace period is over, the process ends as it would have: by the handler that was there before,
else with exit code 128 + signal number.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType


class Preemption:
    """Installed for ``signals`` until ``uninstall``; main thread only, else it does nothing."""

    def __init__(self, signals: Iterable[signal.Signals], *, grace_s: float) -> None:
        self.number: int | None = None
        self._asked_at_s = 0.0
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._previous: dict[int, signal.Handlers | object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._previous[number] = signal.signal(number, self._note)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @property
    def left_s(self) -> float:
        """Seconds of the grace period that are left."""
        return self._asked_at_s + self._grace_s - time.monotonic()

    def finish(self) -> None:
        """End as the process would have ended without us.

        Raises:
            SystemExit: code 128 + signal number, when no handler was there before.
        """
        assert self.number is not None
        previous = self._previous.get(self.number)
        number = self.number
        self.uninstall()
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, None)
            return
        raise SystemExit(128 + number)

    def uninstall(self) -> None:
        """Put the previous handlers back, where ours still stand."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread change handlers; ours does no harm
        for number, previous in self._previous.items():
            # None: a handler that Python did not set and cannot set again.
            if signal.getsignal(number) == self._note and previous is not None:
                signal.signal(number, previous)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: behave as if we were not here
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        del frame
        if self.number is None:
            self.number = number
            self._asked_at_s = time.monotonic()
