"""Which steps go to the object store, and which stay there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistRule:
    """Which committed steps go to the object store: the first at or after each multiple.

    ``seconds``: the first step committed so long after the last one that went. ``mtbf_s``: as often
    as pays off, if failures are assumed to be so far apart, within ``interval_s_min`` and
    ``interval_s_max``. 0: no such rule.
    """

    steps: int = 0
    seconds: float = 0.0
    mtbf_s: float = 0.0
    interval_s_min: float = 0.0
    interval_s_max: float = 0.0

    @property
    def on(self) -> bool:
        """Whether any step goes to the object store by itself."""
        return self.steps > 0 or self.seconds > 0 or self.mtbf_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept in the object store: the union of the rules; no rule at all keeps everything.

    ``last``: the newest n. ``every``: steps that are multiples. ``spaced_s``: one per span of time.
    ``best``: the n best by the key ``metric`` of the user's metadata. ``age_s_min``: nothing
    younger is deleted.
    """

    last: int = 0
    every: int = 0
    spaced_s: float = 0.0
    best: int = 0
    metric: str = ""
    maximize: bool = False
    age_s_min: float = 0.0
