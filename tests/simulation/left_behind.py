"""What restores and rollbacks have left behind, as one who sees all of them counts it.

Of a rollback the rules are these: to a checkpoint on the line, what is later is left. To one that
was left, what was left after it was made stands again up to it, and what was made since is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import SupersedeRule

_Keep = Callable[[SupersedeRule], bool]


class LeftBehind:
    """Rules; those that the catalogue must know, and those that the bucket would tell any other."""

    def __init__(self) -> None:
        self.rules: list[SupersedeRule] = []
        self._known: list[SupersedeRule] = []
        """Since the catalogue last went back: others it may not know."""
        self._unsaid: list[SupersedeRule] = []
        """Of the newest rollback, until its record lies in the bucket."""
        self._recorded: list[SupersedeRule] = []
        self._raised: list[SupersedeRule] = []
        """That a rollback has put out of force; they are back if the catalogue forgets it."""

    def covers(self, key: CheckpointId) -> bool:
        """Tell whether ``key`` was left behind."""
        return _covered(self.rules, key)

    def must_know(self, key: CheckpointId, *, asked: bool) -> bool:
        """Tell whether the catalogue cannot but know that it was; ``asked``: it saw the bucket."""
        return _covered(self._known, key) or (asked and _covered(self._recorded, key))

    def forget(self) -> None:
        """The catalogue has gone back."""
        self._known.clear()
        self.rules[:0], self._raised = self._raised, []

    def restore(self, key: CheckpointId | None, generation: int) -> None:
        """An attempt has begun with ``key``, None: without any."""
        if key is not None and _covered(self._recorded, key):
            self._recorded.clear()  # it could not ask the bucket, and trains now
        step = key.step if key else -1
        self._add(SupersedeRule(after_step=step, below_generation=generation))

    def roll_back(self, key: CheckpointId, generation: int) -> None:
        """A user went back to ``key``."""
        new = [SupersedeRule(after_step=key.step, below_generation=generation)]
        if self.covers(key):
            older = key.generation
            self._raised += [r for r in self.rules if r.below_generation > older]
            self._keep(lambda rule: rule.below_generation <= older)
            new.append(SupersedeRule(
                after_step=-1, below_generation=generation, from_generation=older + 1
            ))  # fmt: skip
        self._unsaid = new
        for rule in new:
            self._add(rule)

    def record(self) -> None:
        """The record of the newest rollback lies in the bucket."""
        self._recorded += self._unsaid
        self._unsaid = []

    def _add(self, rule: SupersedeRule) -> None:
        self.rules.append(rule)
        self._known.append(rule)

    def _keep(self, keeps: _Keep) -> None:
        for rules in (self.rules, self._known, self._recorded):
            rules[:] = filter(keeps, rules)


def _covered(rules: Iterable[SupersedeRule], key: CheckpointId) -> bool:
    return any(rule.covers(key) for rule in rules)
