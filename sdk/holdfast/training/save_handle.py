"""What a save tells its caller: how far it has got, and what went wrong.

Levels only rise. The training thread reads attributes; ``wait`` blocks its caller, nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.session import StepLevels
from holdfast.errors import (
    CheckpointError,
    InvalidRequestError,
    OutcomeUnknownError,
    PreconditionError,
)

Level = Literal["staged", "local", "replicated", "durable"]
WAIT_S_MAX = 600.0
LEVELS: tuple[Level, ...] = ("staged", "local", "replicated", "durable")


GIVEN_UP = (
    "will not become durable: its upload to the object store was given up, because a shard was "
    "lost before it was stored or an older step was restored (event persist_lost)"
)


class SaveHandle:
    """The progress of one save. ``level`` is the highest level that the save has reached.

    ``on_wait`` is called with the deadline before a wait, to complete what the save still lacks.
    ``stall_s`` is how long the training thread waited for this save, the gate included; it is
    final once the next save has begun. ``draining`` is True while the checkpoint is uploaded.

    Args:
        step: Optimizer steps completed.
        reachable: Levels that this save may reach; ``durable`` if any save of the run may.
        rule: Which saves become durable, for the one whose save does not.
    """

    def __init__(self, step: int, *, reachable: frozenset[Level], rule: str = "") -> None:
        self.step = step
        self.level: Level | None = None
        self.stall_s = 0.0
        self.draining = False
        self.on_wait: Callable[[float], None] = lambda _deadline: None
        self._reachable = reachable
        self._failure: CheckpointError | None = None
        self._shortage = ""
        self._not_due = f"will not become durable: {rule or 'persist= is not set'}"
        self._not_durable = "" if "durable" in reachable else self._not_due
        self._changed = threading.Condition()

    @property
    def error(self) -> CheckpointError | None:
        """The reason why this save gets no further, or None.

        Either the save was abandoned, or nodes for its copies are missing. The latter ends when
        such nodes join; the loss of a node counts after half a minute, as it may be restarting.
        """
        if self._failure is not None or not self._lacks_copies():
            return self._failure
        text = f"step {self.step} stays {self.level or 'local'}: {self._shortage}"
        return PreconditionError(text, step=self.step)

    @property
    def abandoned(self) -> bool:
        """Whether this save has failed for good."""
        return self._failure is not None

    def wait(self, level: Level, timeout_s: float | None = None) -> SaveHandle:
        """Return once the save has reached ``level`` or a higher one; None waits ``WAIT_S_MAX``.

        Raises:
            InvalidRequestError: the level does not exist.
            PreconditionError: at once, if the save was abandoned, if it will not become durable,
                or if nodes for its copies are missing.
            OutcomeUnknownError: the save did not reach the level in time; it may do so later.
        """
        if level not in LEVELS:
            raise InvalidRequestError(
                f"level {level!r} does not exist; choose one of {', '.join(LEVELS)}"
            )
        return self._wait(lambda: level, WAIT_S_MAX if timeout_s is None else timeout_s)

    def wait_copies(self, timeout_s: float) -> SaveHandle:
        """Wait for ``replicated``, or for ``local`` while nodes for copies are missing.

        Raises:
            PreconditionError, OutcomeUnknownError: as in ``wait``.
        """
        return self._wait(self._copied_level, timeout_s)

    def _wait(self, wanted: Callable[[], Level], timeout_s: float) -> SaveHandle:
        deadline = time.monotonic() + timeout_s
        self.on_wait(deadline)
        with self._changed:
            while not self._reached(level := wanted()):
                self._check_possible(level)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise OutcomeUnknownError(
                        f"step {self.step} is {self.level or 'not staged'} and did not become "
                        f"{level} "
                        f"within {timeout_s} s; it may still do so later",
                        step=self.step,
                    )
                self._changed.wait(left)
        return self

    def _check_possible(self, level: Level) -> None:
        """Raise PreconditionError if ``level`` will not be reached any more."""
        if self._failure is not None:
            raise PreconditionError(
                f"step {self.step} will not become {level}: {self._failure.message}",
                **{**self._failure.context, "step": self.step},
            ) from self._failure
        if level == "replicated" and self._lacks_copies():
            raise PreconditionError(
                f"step {self.step} does not become replicated: {self._shortage}", step=self.step
            )
        if level == "durable" and self._not_durable:
            raise PreconditionError(f"step {self.step} {self._not_durable}", step=self.step)

    @property
    def copied(self) -> bool:
        """Whether all copies are made that can be made now."""
        return self._reached(self._copied_level())

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen: the strongest level it is due for, or an error."""
        out = {
            *(["durable"] if self._not_durable else []),
            *(["replicated"] if self._shortage else []),
        }
        strongest = max((LEVELS.index(level) for level in self._reachable - out), default=0)
        return self._failure is not None or self._reached(LEVELS[strongest])

    def reach(self, level: Level) -> None:
        """Note that ``level`` is a fact; weaker news than what is known is ignored."""
        with self._changed:
            if not self._reached(level):
                self.level = level
                self._changed.notify_all()

    def fail(self, error: CheckpointError) -> None:
        """Note that this save will get no further than it has."""
        with self._changed:
            if self._failure is None:
                self._failure = error
                self._changed.notify_all()

    def lack_copies(self, reason: str) -> None:
        """Note why nodes for the copies are missing; empty: none is missing."""
        with self._changed:
            if self._shortage != reason:
                self._shortage = reason
                self._changed.notify_all()

    def learn(self, levels: StepLevels, *, postponed: bool = False) -> None:
        """Take over what the agent says of this step; ``postponed``: see ``postponed_step``."""
        if levels.durable:
            self.reach("durable")
        elif levels.replicated:
            self.reach("replicated")
        elif levels.local:
            self.reach("local")
        elif levels.abandoned:
            self.fail(PreconditionError(f"abandoned: {levels.reason}", step=self.step))
        if levels.local and "durable" in self._reachable:
            self._learn_drain(levels, postponed=postponed)

    def _learn_drain(self, levels: StepLevels, *, postponed: bool) -> None:
        """Take over whether a committed step goes to the object store: decided as it commits."""
        with self._changed:
            if levels.draining or levels.durable or postponed:
                self._not_durable = ""
            elif not self._not_durable:
                self._not_durable = GIVEN_UP if self.draining else self._not_due
            self.draining = levels.draining and not levels.durable
            self._changed.notify_all()

    def _copied_level(self) -> Level:
        return "local" if self._shortage else "replicated"

    def _lacks_copies(self) -> bool:
        return bool(self._shortage) and not self._reached("replicated")

    def _reached(self, level: Level) -> bool:
        return self.level is not None and LEVELS.index(self.level) >= LEVELS.index(level)


def postponed_step(rule: PersistRule, steps: Sequence[StepLevels]) -> int:
    """Return the step that may go to the object store once the one on its way is there, or -1.

    One step of a run drains at a time; if another is due meanwhile, the newest one there is goes
    next. Metadata decides it; this tells a handle only that nothing is decided yet.
    """
    newest = max((levels.step for levels in steps if levels.local), default=-1)
    gone = [levels.step for levels in steps if levels.draining or levels.durable]
    if newest in gone or not any(levels.draining for levels in steps):
        return -1
    by_step = rule.steps > 0 and max(gone) // rule.steps < newest // rule.steps
    return newest if by_step or rule.seconds > 0 else -1


def rule_text(rule: PersistRule) -> str:
    """Return which steps become durable, as the end of a sentence; empty: none by itself."""
    texts = []
    if rule.steps:
        texts.append(f"at or after each {rule.steps}")
    if rule.seconds:
        texts.append(f"{rule.seconds:g} s after the last upload began")
    if rule.mtbf_s:
        texts.append("once Auto() finds that it pays")
    return f"persist= takes the first step committed {', or '.join(texts)}" if texts else ""
