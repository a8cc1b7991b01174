"""What retention keeps in the object store: one verdict per durable checkpoint, with its reasons.

The rules of a policy are a union: what any of them names is kept, no rule at all keeps
everything. ``age_s_min`` is no rule but a brake: beside rules it keeps what is young, alone it
keeps everything. Whatever the policy says, these stay: what somebody holds (a pin, a reader, a
restore) and the newest checkpoint that can be restored. Superseded and bad ones are outside the
policy: they are neither counted by its rules nor expired by them, and go by ``rm`` alone.

Times are the database's clock, the only one that deletes. An age is counted from when this
database saw the checkpoint become durable, so that no other clock can make it look older: a
clock that jumps by t deletes what ``age_s_min`` protects at most t too early, and a checkpoint
of the future is simply young. No other rule but ``spaced_s`` looks at a clock at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.core.ids import STEP_MAX, CheckpointId
from holdfast.core.persistence_rules import Retention
from holdfast.errors import InvalidRequestError

COUNT_MAX = 1_000_000
SECONDS_MAX = 100 * 366 * 86400.0
SPACED_S_MIN = 1.0
METRIC_LENGTH_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A durable checkpoint that has not expired, as the policy sees it.

    ``holds`` says who needs it just now, whatever the policy. ``metric`` is its value of the
    policy's metric, None when its notes have no finite number under that name.
    """

    id: CheckpointId
    committed_at_s: float
    durable_at_s: float
    superseded: bool = False
    bad: bool = False
    metric: float | None = None
    holds: tuple[str, ...] = ()

    @property
    def restorable(self) -> bool:
        """Whether a restore may choose it."""
        return not self.superseded and not self.bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a checkpoint stays, and all the reasons why; ``expired``: that is settled."""

    id: CheckpointId
    keep: bool
    why: str
    expired: bool = False


def check(policy: Retention) -> Retention:
    """Return the policy if its numbers make sense and are within bounds.

    Raises:
        InvalidRequestError: names the number.
    """
    if policy.best and not policy.metric:
        raise InvalidRequestError(f"retention best={policy.best} needs the name of a metric")
    most = {"last": COUNT_MAX, "best": COUNT_MAX, "every": STEP_MAX}
    for name, limit in {**most, "spaced_s": SECONDS_MAX, "age_s_min": SECONDS_MAX}.items():
        if not 0 <= getattr(policy, name) <= limit:
            raise InvalidRequestError(
                f"retention {name}={getattr(policy, name)} must be 0 to {limit}"
            )
    if 0 < policy.spaced_s < SPACED_S_MIN:
        raise InvalidRequestError(f"retention spaced_s={policy.spaced_s} must be 1 s or more")
    if len(policy.metric) > METRIC_LENGTH_MAX:
        raise InvalidRequestError(f"retention metric is longer than {METRIC_LENGTH_MAX} characters")
    return policy


def on(policy: Retention | None) -> bool:
    """Tell whether the policy has any rule: without one everything is kept."""
    return policy is not None and bool(
        policy.last or policy.every or policy.spaced_s or policy.best
    )


def metric_of(notes: str, name: str) -> float | None:
    """Return the finite number that the notes, a JSON object, have under ``name``, or None."""
    if not name or not notes:
        return None
    try:
        value = json.loads(notes).get(name)
    except (ValueError, AttributeError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def plan(
    stored: Iterable[Candidate], policy: Retention | None, now_s: float
) -> tuple[Verdict, ...]:
    """Return a verdict for each checkpoint, newest first.

    Pure and idempotent: with what it expires taken away, it keeps all the rest.
    """
    ordered = sorted(stored, key=lambda item: item.id, reverse=True)
    why: dict[CheckpointId, list[str]] = {item.id: list(item.holds) for item in ordered}
    counted = [item for item in ordered if item.restorable]
    if counted:
        why[counted[0].id].append("the newest that can be restored")
    for item in ordered:
        if not item.restorable:
            why[item.id].append("superseded" if item.superseded else "bad, kept for a look at it")
    if policy is None or not on(policy):
        for reasons in why.values():
            reasons.append("no rule: everything is kept")
    else:
        for kept, reason in _named(counted, policy, now_s):
            why[kept].append(reason)
    return tuple(
        Verdict(id=key, keep=bool(reasons), why=", ".join(reasons) or "no rule keeps it")
        for key, reasons in why.items()
    )


def _named(
    counted: Sequence[Candidate], policy: Retention, now_s: float
) -> Iterable[tuple[CheckpointId, str]]:
    """Yield what the rules keep of ``counted``, newest first, with the rule."""
    for item in counted[: policy.last]:
        yield item.id, f"one of the last {policy.last}"
    for item in _spaced(counted, policy.spaced_s):
        yield item.id, f"first in {policy.spaced_s:g} s"
    for item in _best(counted, policy):
        yield item.id, f"one of the best {policy.best} by {policy.metric} ({item.metric:g})"
    for item in counted:
        if policy.every and item.id.step % policy.every == 0:
            yield item.id, f"a multiple of {policy.every}"
        if policy.age_s_min and now_s - item.durable_at_s < policy.age_s_min:
            yield item.id, f"younger than {policy.age_s_min:g} s"


def _spaced(counted: Sequence[Candidate], span_s: float) -> Iterable[Candidate]:
    """Return the first one committed in each span: later ones never push it out."""
    if not span_s:
        return ()
    first: dict[float, Candidate] = {}
    for item in sorted(counted, key=lambda item: (item.committed_at_s, item.id)):
        first.setdefault(item.committed_at_s // span_s, item)
    return first.values()


def _best(counted: Sequence[Candidate], policy: Retention) -> Sequence[Candidate]:
    """Return the best by the metric; of equals the newer ones."""
    sign = -1.0 if policy.maximize else 1.0
    measured = [(sign * item.metric, item) for item in counted if item.metric is not None]
    return [item for _, item in sorted(measured, key=lambda pair: pair[0])[: policy.best]]
