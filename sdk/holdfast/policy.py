"""When a step is saved, and how many copies of it are kept.

Small values that users combine. A policy answers four questions and decides nothing by itself:
``due`` is a function of the step alone, so all ranks agree without a word; ``interval_s`` and
``signals`` are wishes that become a step number which metadata announces to all ranks; ``at_exit``
needs no agreement, as all ranks have done the same last step.

Knows nothing of ranks, clocks or torch. Units: seconds, optimizer steps.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core import persistence_rules, protection
from holdfast.core.announcements import SaveReason
from holdfast.core.attempts import PARITY_GROUP_MAX, PARITY_GROUP_MIN, PARITY_MAX
from holdfast.core.budget import checked_slots
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.protection import Protection
from holdfast.core.save_interval import Observed, Wish, optimum_s, time_text
from holdfast.errors import InvalidRequestError

__all__ = [
    "AnyOf",
    "AtExit",
    "Auto",
    "EverySeconds",
    "EverySteps",
    "Never",
    "OnPreemption",
    "Policy",
    "Replicas",
    "Retention",
]


class Policy:
    """When to save; the base answers "never" to all questions."""

    @property
    def at_exit(self) -> bool:
        """Whether the last step is saved as training ends in order."""
        return False

    def due(self, step: int) -> bool:
        """Tell whether ``step`` is saved, on every rank alike."""
        del step
        return False

    def interval_s(self, observed: Observed) -> float:
        """Return the seconds wanted between announced saves; 0 for none.

        Args:
            observed: What saves and restores cost, and how often the job fails.
        """
        del observed
        return 0.0

    def signals(self) -> frozenset[signal.Signals]:
        """Return the signals that ask for a last save before the process ends."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class Never(Policy):
    """Save only when ``Checkpointer.save`` is called."""


@dataclass(frozen=True, slots=True)
class AtExit(Policy):
    """Save the last step once, when the script calls ``close`` or runs to its end.

    Until then nothing is copied. After an exception nothing is saved: what the state is then, no
    step has been. A crash loses what was done since the checkpoint before.
    """

    @property
    def at_exit(self) -> bool:
        """Whether the last step is saved: it is."""
        return True


@dataclass(frozen=True, slots=True)
class EverySteps(Policy):
    """Save at each optimizer step that is a multiple of ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        if not _is_count(self.steps, 1):
            raise InvalidRequestError(f"EverySteps takes a whole number from 1, not {self.steps!r}")

    def due(self, step: int) -> bool:
        """Tell whether ``step`` is a multiple."""
        return step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EverySeconds(Policy):
    """Save every ``seconds`` of wall time, at a step that all ranks are told in advance."""

    seconds: float

    def __post_init__(self) -> None:
        if not _is_time(self.seconds):
            raise InvalidRequestError(f"EverySeconds takes seconds above 0, not {self.seconds!r}")

    def interval_s(self, observed: Observed) -> float:
        """Return ``seconds``."""
        del observed
        return self.seconds


@dataclass(frozen=True, slots=True)
class Auto(Policy):
    """Save at the interval at which saves, lost work and restarts together cost least.

    It follows from what saves stall training, what the restore took and how often attempts of this
    job have failed; ``core.save_interval`` has the formula.

    Args:
        mtbf_s: Mean time between failures of the whole job, in seconds, as long as nothing better
            is known: it counts as one failure seen in that time.
        interval_s_min: The interval is never shorter than these seconds.
        interval_s_max: Nor is it longer than these.
    """

    mtbf_s: float = 4 * 3600.0
    interval_s_min: float = 1.0
    interval_s_max: float = 3600.0

    def __post_init__(self) -> None:
        if not all(map(_is_time, (self.mtbf_s, self.interval_s_min, self.interval_s_max))):
            raise InvalidRequestError(
                "Auto takes mtbf_s, interval_s_min and interval_s_max in seconds above 0"
            )
        if self.interval_s_max < self.interval_s_min:
            raise InvalidRequestError(
                f"Auto: interval_s_max={self.interval_s_max} is less than "
                f"interval_s_min={self.interval_s_min}"
            )

    def interval_s(self, observed: Observed) -> float:
        """Return the optimum for what was observed, within the bounds."""
        return min(max(self._optimum_s(observed), self.interval_s_min), self.interval_s_max)

    def why(self, observed: Observed) -> str:
        """Return how ``interval_s`` came about, for people."""
        interval_s, record = self.interval_s(observed), observed.record
        best_s = self._optimum_s(observed)
        bound = "" if best_s == interval_s else f" (best would be {time_text(best_s)}, but "
        if bound:
            shorter = best_s < interval_s
            bound += f"interval_s_{'min' if shorter else 'max'}={interval_s:g})"
        restart = f"a restore takes {time_text(observed.restore_s)}, " if observed.restore_s else ""
        count = record.failures_count
        failures = f"{count or 'no'} failure{'' if count == 1 else 's'}"
        return (
            f"every {time_text(interval_s)}{bound}: a save stalls training for "
            f"{time_text(observed.stall_s)}, {restart}{failures} in "
            f"{time_text(record.trained_s + observed.training_s)} of training and one assumed in "
            f"{time_text(self.mtbf_s)} make one in {time_text(self._mtbf_s(observed))}"
        )

    def _mtbf_s(self, observed: Observed) -> float:
        return observed.record.mtbf_s(self.mtbf_s, observed.training_s)

    def _optimum_s(self, observed: Observed) -> float:
        return optimum_s(observed.stall_s, self._mtbf_s(observed), observed.restore_s)


@dataclass(frozen=True, slots=True)
class OnPreemption(Policy):
    """Save once more after SIGTERM or SIGINT; then the process ends as the signal demands.

    The signal handler only sets a flag; the save happens at a step that all ranks agree on.

    Args:
        grace_s: Seconds from the signal after which the process ends without that save.
    """

    grace_s: float = 25.0

    def __post_init__(self) -> None:
        if self.grace_s != 0 and not _is_time(self.grace_s):
            raise InvalidRequestError(f"OnPreemption takes seconds from 0, not {self.grace_s!r}")

    def signals(self) -> frozenset[signal.Signals]:
        """Return SIGTERM and SIGINT."""
        return frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True, slots=True, init=False)
class AnyOf(Policy):
    """Save when at least one of ``policies`` does; one that is an ``AnyOf`` stands for its own."""

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        for policy in policies:
            if not isinstance(policy, Policy):
                raise InvalidRequestError(
                    f"AnyOf takes policies, such as holdfast.EverySteps(10), not {policy!r}"
                )
        flat = tuple(part for policy in policies for part in _parts(policy))
        object.__setattr__(self, "policies", flat)

    @property
    def at_exit(self) -> bool:
        """Whether one of the policies saves the last step."""
        return any(policy.at_exit for policy in self.policies)

    def due(self, step: int) -> bool:
        """Tell whether one of the policies saves ``step``."""
        return any(policy.due(step) for policy in self.policies)

    def interval_s(self, observed: Observed) -> float:
        """Return the shortest interval of the policies; 0 when none has one."""
        wishes = (policy.interval_s(observed) for policy in self.policies)
        return min((wish for wish in wishes if wish > 0), default=0.0)

    def signals(self) -> frozenset[signal.Signals]:
        """Return the signals of all policies."""
        return frozenset().union(*(policy.signals() for policy in self.policies))


def grace_s(policy: Policy) -> float:
    """Return the grace period after a signal: the longest among the parts of ``policy``."""
    graces = [part.grace_s for part in _parts(policy) if isinstance(part, OnPreemption)]
    return max(graces, default=0.0)


def chosen_interval(policy: Policy, observed: Observed) -> Wish:
    """Return the shortest interval among the parts of ``policy``, whose it is, and why."""
    wishes = [(part.interval_s(observed), part) for part in _parts(policy)]
    interval_s, shortest = min(
        ((wish_s, part) for wish_s, part in wishes if wish_s > 0),
        key=lambda wish: wish[0],
        default=(0.0, None),
    )
    if shortest is None:
        return Wish()
    if isinstance(shortest, Auto):
        return Wish(interval_s, SaveReason.AUTO, shortest.why(observed))
    return Wish(interval_s, SaveReason.INTERVAL)


def _parts(policy: Policy) -> Sequence[Policy]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention(persistence_rules.Retention):
    """Which checkpoints the object store keeps: those that at least one rule names.

    Without a rule, the store keeps all of them.

    Args:
        last: Keep the newest n.
        every: Keep the steps that are multiples of this number.
        spaced_s: Keep one checkpoint for each span of so many seconds.
        best: Keep the n best by ``metric``, a key of the notes given to ``step``; lower values are
            better, unless ``maximize``.
        age_s_min: Keep checkpoints that are younger than so many seconds.
    """

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise InvalidRequestError(f"Retention: {name} must be a whole number, 0 or more")
        for name in ("spaced_s", "age_s_min"):
            if getattr(self, name) != 0 and not _is_time(getattr(self, name)):
                raise InvalidRequestError(f"Retention: {name} must be seconds, 0 or more")
        if bool(self.best) != bool(self.metric):
            raise InvalidRequestError(
                "Retention: pass best= and metric= together; metric is a key of the notes"
            )


def save_policy(policy: Policy | None) -> Policy:
    """Return when to save; None: at each step.

    Raises:
        InvalidRequestError: it is no policy.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise InvalidRequestError(
            f"save={policy!r} is not a policy: pass one, such as holdfast.EverySteps(10)"
        )
    return policy or EverySteps(1)


def kept(retention: Retention | None) -> Retention | None:
    """Return what the object store keeps; None leaves the job its policy.

    Raises:
        InvalidRequestError: it is no Retention.
    """
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidRequestError(
            f"keep={retention!r} is not a Retention: pass one, such as holdfast.Retention(last=5)"
        )
    return retention


def persist_rule(policy: Policy | None) -> PersistRule:
    """Return which committed steps ``policy`` sends to the object store; None sends nothing.

    Raises:
        InvalidRequestError: a policy that means nothing there; names those that do.
    """
    parts = () if policy is None else _parts(policy)
    autos = [part for part in parts if isinstance(part, Auto)]
    steps = [part.steps for part in parts if isinstance(part, EverySteps)]
    seconds = [part.seconds for part in parts if isinstance(part, EverySeconds)]
    others = [part for part in parts if not isinstance(part, EverySteps | EverySeconds | Auto)]
    if any(not isinstance(part, Never) for part in others):
        raise InvalidRequestError(
            f"persist={policy!r} is not supported: use EverySteps, EverySeconds, Auto, AnyOf of "
            f"these, or Never"
        )
    if max(len(steps), len(seconds), len(autos)) > 1:
        raise InvalidRequestError(
            f"persist={policy!r}: use at most one EverySteps, one EverySeconds and one Auto"
        )
    rule = PersistRule(steps=sum(steps), seconds=sum(seconds))
    for auto in autos:
        rule = replace(
            rule,
            mtbf_s=auto.mtbf_s,
            interval_s_min=auto.interval_s_min,
            interval_s_max=auto.interval_s_max,
        )
    return rule


@dataclass(frozen=True, slots=True)
class Replicas:
    """Copies of each shard on other nodes.

    Args:
        count: Number of copies, from 0. With fewer nodes there are fewer copies, and an event.
        domain: If set (a kind of failure domain such as ``"rack"``), the rank's node and the nodes
            of all copies are in different domains, as the agents' ``HOLDFAST_DOMAIN`` names them.
    """

    count: int
    domain: str = ""

    def __post_init__(self) -> None:
        if not _is_count(self.count, 0):
            raise InvalidRequestError(f"replicas must be 0, 1, 2 ..., not {self.count!r}")
        if not isinstance(self.domain, str):
            raise InvalidRequestError(
                f"Replicas: domain must be a name such as 'rack', not {self.domain!r}"
            )


@dataclass(frozen=True, slots=True)
class Parity:
    """Parity in place of whole copies: any ``m`` nodes may be lost, for ``m / k`` of the memory.

    The shards of each ``k`` nodes are summed up to ``m`` elements, which lie on ``m`` others. It
    takes ``k + m`` nodes; with fewer, it is a smaller one of the same price, and an event.

    Args:
        k: Nodes whose shards are summed up together, 2 to 64.
        m: Elements for them, 1 to 16, and nodes that may be lost.
        domain: If set (a kind of failure domain such as ``"rack"``), shards and elements that are
            needed together are in different domains, and any ``m`` of these may be lost.
    """

    k: int
    m: int
    domain: str = ""

    def __post_init__(self) -> None:
        fits = _is_count(self.k, PARITY_GROUP_MIN) and _is_count(self.m, 1)
        if not fits or self.k > PARITY_GROUP_MAX or self.m > PARITY_MAX:
            raise InvalidRequestError(
                f"Parity: k must be {PARITY_GROUP_MIN} to {PARITY_GROUP_MAX} and m 1 to "
                f"{PARITY_MAX}, not {self.k!r} and {self.m!r}; with k=1 it would be m copies: "
                f"replicas=m"
            )
        if not isinstance(self.domain, str):
            raise InvalidRequestError(
                f"Parity: domain must be a name such as 'rack', not {self.domain!r}"
            )


def protection_of(replicas: int | Replicas | Parity) -> Protection:
    """Return what is asked for against the loss of nodes.

    Raises:
        InvalidRequestError: it is no number from 0.
    """
    if isinstance(replicas, Parity):
        return protection.Parity(replicas.k, replicas.m, replicas.domain)
    asked = replicas if isinstance(replicas, Replicas) else Replicas(replicas)
    return protection.Copies(asked.count, asked.domain)


def slots_of(slots: int | None) -> int:
    """Return the slots of memory that each rank asks for, 0: as many as it needs.

    Raises:
        InvalidRequestError: it is no number that a rank can have.
    """
    if slots is None:
        return 0
    if not _is_count(slots, 1):
        raise InvalidRequestError(f"slots must be a whole number, not {slots!r}")
    return checked_slots(slots)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max
