"""How long ``persist=Auto()`` waits between two drains, and why. Pure; seconds.

A drain stalls nobody, but it takes from training's network and memory: by our own aim 3 % of the
pace while it runs. The rest is as with saves: what it costs against what a failure would, had it
taken all copies in memory with it. How often that happens nobody has seen, so each failure counts.
"""

from __future__ import annotations

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.save_interval import optimum_s, time_text
from holdfast_services.metadata.domain.model import Run

DRAIN_LOAD = 0.03
"""Of training's pace, while a checkpoint drains: what ``train/while_draining`` is held to."""
DRAINING_PART_MAX = 0.5
"""Of the time: a slow store is not written without a rest."""


def due(rule: PersistRule, run: Run, now_s: float) -> bool:
    """Tell whether the next committed step goes; never while another one is on its way."""
    if not rule.mtbf_s or run.drains:
        return False
    return now_s - run.persisted_at_s >= interval_s(rule, run, now_s)


def interval_s(rule: PersistRule, run: Run, now_s: float) -> float:
    """Return the time from the beginning of one drain to that of the next.

    The first one goes at once: until then nobody knows what it takes.
    """
    return min(max(_best_s(rule, run, now_s), rule.interval_s_min), rule.interval_s_max)


def why(rule: PersistRule, run: Run, now_s: float) -> str:
    """Return how ``interval_s`` came about, for people; empty: the rule has none."""
    if not rule.mtbf_s:
        return ""
    chosen_s, best_s = interval_s(rule, run, now_s), _best_s(rule, run, now_s)
    bound = "" if chosen_s == best_s else f" (best would be {time_text(best_s)})"
    count = run.record.failures_count
    return (
        f"every {time_text(chosen_s)}{bound}: an upload takes {time_text(_drain_s(run))}, "
        f"{count or 'no'} failure{'' if count == 1 else 's'} in "
        f"{time_text(run.record.trained_s + _training_s(run, now_s))} of training and one assumed "
        f"in {time_text(rule.mtbf_s)} make one in {time_text(_mtbf_s(rule, run, now_s))}"
    )


def _best_s(rule: PersistRule, run: Run, now_s: float) -> float:
    drain_s = _drain_s(run)
    best_s = optimum_s(DRAIN_LOAD * drain_s, _mtbf_s(rule, run, now_s))
    return max(best_s, drain_s / DRAINING_PART_MAX)


def _mtbf_s(rule: PersistRule, run: Run, now_s: float) -> float:
    return run.record.mtbf_s(rule.mtbf_s, _training_s(run, now_s))


def _training_s(run: Run, now_s: float) -> float:
    return max(0.0, now_s - run.attempt.started_at_s) if run.attempt else 0.0


def _drain_s(run: Run) -> float:
    """Return what the last drain took, 0: it has not ended well, or there was none."""
    ends = (
        row.durable_at_s
        for row in run.checkpoints
        if row.durable_at_s is not None and row.id.step == run.persisted_step
    )
    return max(0.0, max(ends, default=0.0) - run.persisted_at_s)
