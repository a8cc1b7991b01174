"""SIGTERM and SIGINT as a wish for one more save.

The handler only notes the time; ``Checkpointer.step`` consumes it. When all is saved, or the
grace period is over, the process ends as it would have: by the handler that was there before,
else with exit code 128 + signal number. Whoever sends a signal again means it: that one goes to
the handler that was there before, at once. A signal that is ignored stays ignored.

There is one handler per signal in a process, however many Checkpointers wish to hear of it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from holdfast.errors import CheckpointError
from holdfast.training.save_handle import SaveHandle

REPEAT_S = 2.0
"""A terminal and a launcher, or two launchers, send one signal twice: that is one wish."""

log = logging.getLogger(__name__)

_previous: dict[int, Any] = {}
_wishes: list[Preemption] = []
_passing: set[int] = set()


class Preemption:
    """Listens for ``signals`` until ``uninstall``; outside the main thread it does nothing.

    ``done`` is set once the owner's last save is on its way.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals],
        *,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number: int | None = None
        self.done = False
        self._asked_at_s = 0.0
        self._grace_s = grace_s
        self._clock = clock
        self.pid = os.getpid()
        self.signals = frozenset[signal.Signals]()
        if threading.current_thread() is threading.main_thread():
            self.signals = frozenset(number for number in signals if _install(number))
            _wishes.append(self)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @property
    def left_s(self) -> float:
        """Seconds of the grace period that are left."""
        return self._asked_at_s + self._grace_s - self._clock()

    @property
    def waits_for_others(self) -> bool:
        """Whether another Checkpointer of this process has still to make its last save."""
        return any(not wish.done for wish in _mine() if wish.asked and wish is not self)

    def is_over(self, *, saved: bool) -> bool:
        """Tell whether the process may end; ``saved``: the last save is on its way by now.

        A Checkpointer that is done goes on while another of this process is not.
        """
        self.done = self.done or saved
        return self.left_s <= 0 or (self.done and not self.waits_for_others)

    def await_copies(self, handle: SaveHandle | None, job: str) -> None:
        """Wait, while there is time left, until the last save is as safe as it can be."""
        if handle is None or self.left_s <= 0:
            return
        try:
            handle.wait_copies(self.left_s)
        except CheckpointError as error:
            log.warning("job %s: the process ends before its last save is safe: %s", job, error)

    def finish(self) -> None:
        """End the process as it would have ended without Holdfast.

        Raises:
            SystemExit: code 128 + signal number, when no handler was there before.
        """
        assert self.number is not None
        previous = _previous.get(self.number)
        self.uninstall()
        if callable(previous) and previous is not signal.default_int_handler:
            previous(self.number, None)
            return
        raise SystemExit(128 + self.number)

    def uninstall(self) -> None:
        """Stop listening; the last one puts the previous handlers back, where ours still stand."""
        if os.getpid() != self.pid or self not in _wishes:
            return
        _wishes.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread change handlers; ours passes signals on
        for number in self.signals:
            heard = any(number in wish.signals for wish in _mine())
            # None: a handler that Python did not set and cannot set again.
            if not heard and signal.getsignal(number) is _note and _previous[number] is not None:
                signal.signal(number, _previous[number])

    def hear(self, number: int) -> bool:
        """Note a signal; return whether it is the first, or the first one sent twice."""
        if number not in self.signals:
            return False
        now_s = self._clock()
        if self.number is None:
            self.number, self._asked_at_s = number, now_s
        return now_s < self._asked_at_s + min(REPEAT_S, self._grace_s)


def _mine() -> list[Preemption]:
    """Return the wishes of this process; a forked child has copies of its parent's."""
    return [wish for wish in _wishes if wish.pid == os.getpid()]


def _install(number: signal.Signals) -> bool:
    """Put our handler in place, unless the signal is ignored; tell whether it is there."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        log.info("this process ignores %s, so the signal does not ask for a save", number.name)
        return False
    if before is not _note:
        _previous[number] = signal.signal(number, _note)
    return True


def _note(number: int, frame: FrameType | None) -> None:
    heard = [wish.hear(number) for wish in _mine()]
    if any(heard):
        return
    # Sent again, or to a forked child, or after the last Checkpointer has closed.
    previous = _previous[number]
    if callable(previous):
        if number not in _passing:  # a handler that was put over ours may call ours
            _passing.add(number)
            try:
                previous(number, frame)
            finally:
                _passing.discard(number)
    elif previous is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
