"""The wait of a rank that has saved the last step of its round: it does none that would be lost.

Training never stops by that: the wait ends when the step was given up or the round goes on after
all, and in any case soon after the step could have been committed.
"""

from __future__ import annotations

import os
import time

from holdfast.core.announcements import Announcement
from holdfast.core.session import SessionView
from holdfast.errors import CheckpointError, OutcomeUnknownError
from holdfast.logs import steady_logger
from holdfast.training.preemption import Preemption
from holdfast.training.save_handle import SaveHandle
from holdfast.training.session import AgentSession

COPY_S_MAX = 60.0
END_S_MAX = 30.0
"""After its copy: sealing, the commit, and a launcher that hears of it."""
LOOK_S = 0.1
"""Nobody wakes this wait after a signal."""

log = steady_logger(__name__)

_ends: list[RoundEnd] = []


class RoundEnd:
    """What one Checkpointer has to do with the end of its round, from ``restore`` to ``close``.

    Owns ``preemption``, which ``close`` uninstalls.
    """

    def __init__(self, session: AgentSession, preemption: Preemption) -> None:
        self._session = session
        self._preemption = preemption
        self._saved = 0
        self._pid = os.getpid()
        _ends.append(self)

    def close(self) -> None:
        """Hear of no signal, and have the others of this process wait for it no more."""
        self._preemption.uninstall()
        if self in _ends:
            _ends.remove(self)

    def saved(self, announced: Announcement, handle: SaveHandle) -> bool:
        """Tell people why this step is saved, and wait for the end of the round if it is the last.

        Where a process has several Checkpointers, the last one to save waits.

        Returns:
            Whether this rank is to end after it: a signal has come, and the others wait as well.
        """
        self._saved = announced.step
        spec, reason = self._session.spec, announced.reason
        if spec.rank == 0:
            log.info("job %s: all ranks save step %d: %s", spec.job, handle.step, reason.text)
        if not reason.ends_round:
            return False
        if not self._others_are_open() and self._is_copied(handle):
            self._wait(announced, handle)
        return self._preemption.asked

    def _is_copied(self, handle: SaveHandle) -> bool:
        """Tell whether the state has been copied, once that is known."""
        ends_s = time.monotonic() + COPY_S_MAX
        while not self._preemption.asked and time.monotonic() < ends_s:
            try:
                handle.wait("staged", LOOK_S)
            except OutcomeUnknownError:
                continue
            except CheckpointError:
                return False
            return True
        return False

    def _wait(self, announced: Announcement, handle: SaveHandle) -> None:
        """Wait to be ended; return if this rank is to go on."""
        began_s = time.monotonic()
        while (left_s := began_s + END_S_MAX - time.monotonic()) > 0 and not self._preemption.asked:
            look_s = min(LOOK_S, left_s)
            if self._session.wait_view(lambda v: goes_on(v, announced), timeout_s=look_s):
                break
            if handle.abandoned:
                break
        waited_s = time.monotonic() - began_s
        log.info("step %d was not the last one: this rank waited %.1f s", handle.step, waited_s)

    def _others_are_open(self) -> bool:
        """Tell whether another one's last step is still to be saved, or is not known yet."""
        mine = (end for end in _ends if end is not self and end._pid == self._pid)  # noqa: SLF001
        views = ((end._session.view.announcement, end._saved) for end in mine)  # noqa: SLF001
        return any(known is None or known.step != saved for known, saved in views)


def goes_on(view: SessionView, announced: Announcement) -> bool:
    """Tell whether a rank that waits at ``announced`` is to go on, by what its agent says.

    An agent that has just restarted announces nothing yet.
    """
    return view.fenced or view.announcement not in (None, announced)
