"""What a save tells its caller: how far it has got, and what went wrong.

Levels only rise. The training thread reads attributes; ``wait`` blocks its caller, nobody else.
"""

from __future__ import annotations

import threading
import time
from typing import Literal

from holdfast.core.session import StepLevels
from holdfast.errors import (
    CheckpointError,
    InvalidRequestError,
    OutcomeUnknownError,
    PreconditionError,
)

Level = Literal["staged", "local", "replicated", "durable"]
LEVELS: tuple[Level, ...] = ("staged", "local", "replicated", "durable")


class SaveHandle:
    """One save. ``level`` is the highest level reached, ``error`` why it will get no further.

    ``stall_s`` is how long the training thread waited for this save, the gate included; it is
    final once the next save has begun.
    """

    def __init__(self, step: int, *, reachable: frozenset[Level]) -> None:
        self.step = step
        self.level: Level | None = None
        self.error: CheckpointError | None = None
        self.stall_s = 0.0
        self._reachable = reachable
        self._changed = threading.Condition()

    def wait(self, level: Level, timeout_s: float | None = None) -> SaveHandle:
        """Return once ``level`` or a stronger one is reached.

        Raises:
            InvalidRequestError: no such level.
            PreconditionError: at once, when this save was abandoned or is not due for that level.
            OutcomeUnknownError: not reached within ``timeout_s``; it may be later.
        """
        if level not in LEVELS:
            raise InvalidRequestError(f"level {level!r} is none of {', '.join(LEVELS)}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._reached(level):
                if self.error is not None:
                    raise PreconditionError(
                        f"step {self.step} will not become {level}: {self.error}", step=self.step
                    ) from self.error
                if level not in self._reachable:
                    raise PreconditionError(
                        f"step {self.step} is not due for {level}", step=self.step
                    )
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise OutcomeUnknownError(
                        f"step {self.step} is {self.level or 'not staged'}, not yet {level}, "
                        f"after {timeout_s} s",
                        step=self.step,
                    )
                self._changed.wait(left)
        return self

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen: the strongest reachable level, or an error."""
        strongest = max((LEVELS.index(level) for level in self._reachable), default=0)
        return self.error is not None or self._reached(LEVELS[strongest])

    def reach(self, level: Level) -> None:
        """Note that ``level`` is a fact; weaker news than what is known is ignored."""
        with self._changed:
            if not self._reached(level):
                self.level = level
                self._changed.notify_all()

    def fail(self, error: CheckpointError) -> None:
        """Note that this save will get no further than it has."""
        with self._changed:
            if self.error is None:
                self.error = error
                self._changed.notify_all()

    def learn(self, levels: StepLevels) -> None:
        """Take over what the agent says of this step."""
        if levels.durable:
            self.reach("durable")
        elif levels.replicated:
            self.reach("replicated")
        elif levels.local:
            self.reach("local")
        elif levels.abandoned:
            self.fail(PreconditionError(f"abandoned: {levels.reason}", step=self.step))

    def _reached(self, level: Level) -> bool:
        return self.level is not None and LEVELS.index(self.level) >= LEVELS.index(level)
