"""The handles of a rank's saves by step, bounded: through them callers learn the levels."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.session import StepLevels
from holdfast.errors import CheckpointError
from holdfast.training.save_handle import Level, SaveHandle, postponed_step, rule_text

HANDLES_COUNT_MAX = 64


class Handles:
    """The newest ``HANDLES_COUNT_MAX`` handles; those that still drain are kept before others.

    Args:
        rule: Which saves become durable.
    """

    def __init__(self, rule: PersistRule) -> None:
        self._rule = rule
        self._text = rule_text(rule)
        levels: list[Level] = ["staged", "local", "replicated"]
        self._reachable = frozenset([*levels, "durable"] if rule.on else levels)
        self._known: dict[int, SaveHandle] = {}
        self._shortage = ""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, step: int) -> bool:
        return step in self._known

    def get(self, step: int) -> SaveHandle | None:
        """Return the handle of ``step``, None: not saved, or long ago."""
        return self._known.get(step)

    def make(self, step: int) -> SaveHandle:
        """Return a new handle, which from now on learns what becomes of ``step``."""
        handle = SaveHandle(step, reachable=self._reachable, rule=self._text)
        self.remember(handle)
        return handle

    def remember(self, handle: SaveHandle) -> None:
        """Have ``handle`` learn what becomes of its step; forget one that has ended."""
        if self._shortage:
            handle.lack_copies(self._shortage)
        self._known[handle.step] = handle
        while len(self._known) > HANDLES_COUNT_MAX:
            # A drain is slow: many later steps begin and end before its handle has learned all.
            ended = (step for step, known in self._known.items() if not known.draining)
            del self._known[next(ended, next(iter(self._known)))]

    @property
    def latest(self) -> SaveHandle | None:
        """The handle that was made last."""
        return next(reversed(self._known.values()), None)

    @property
    def newest(self) -> SaveHandle | None:
        """The handle of the highest step."""
        return max(self._known.values(), key=lambda handle: handle.step, default=None)

    def learn(self, steps: Sequence[StepLevels]) -> None:
        """Tell each handle what the agent says of its step."""
        postponed = postponed_step(self._rule, steps)
        for levels in steps:
            handle = self._known.get(levels.step)
            if handle is not None:
                handle.learn(levels, postponed=levels.step == postponed)

    def lack_copies(self, reason: str) -> None:
        """Tell all handles why nodes for the copies are missing; empty: none is missing."""
        self._shortage = reason
        for handle in self._known.values():
            handle.lack_copies(reason)

    def stage(self, step: int) -> None:
        """Tell the handle of ``step`` that its copy is closed."""
        handle = self._known.get(step)
        if handle is not None:
            handle.reach("staged")

    def fail(self, step: int, error: CheckpointError) -> None:
        """Tell the handle of ``step`` that it gets no further."""
        handle = self._known.get(step)
        if handle is not None:
            handle.fail(error)

    def fail_all(self, error: CheckpointError) -> None:
        """Fail all unfinished handles, so that waits for them end."""
        for handle in self._known.values():
            if not handle.ended:
                handle.fail(error)
