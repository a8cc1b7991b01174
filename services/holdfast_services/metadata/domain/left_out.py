"""Nodes that are bad from the start: they are left out, and do not use up the restarts of a launch.

That is told by who fails: rounds in a row that always the same node ends before its first step.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.rounds import RankFailure
from holdfast_services.metadata.domain.launch import Launch, Launcher
from holdfast_services.metadata.domain.round_news import said

EARLY_S = 300.0
"""Imports and the start of a model take less: what has done no step by then is not early."""
EARLY_MAX = 3
"""A node whose ranks end so many rounds in a row before their first step is left out."""
LEFT_OUT_S = 3600.0
LEFT_OUT_PART_MAX = 4
"""Of the nodes that are here one in so many may be left out, and one of fewer: where it does not
help it is not the nodes."""


def counted(launch: Launch, name: str, failure: RankFailure, now_s: float) -> Launch:
    """Return the launch that knows how many rounds in a row a node has ended early."""
    if failure.of_peer:
        return launch
    early = failure.step < 0 and now_s - launch.began_at_s < EARLY_S
    launchers = tuple(
        replace(one, early_count=one.early_count + 1 if early and one.id == name else 0)
        for one in launch.launchers
    )
    return replace(launch, launchers=launchers)


def is_due(launch: Launch, name: str, failure: RankFailure) -> bool:
    """Tell whether the next round should begin without a launcher: the others may go on."""
    one = launch.launcher(name)
    # What comes again ends the launch, if it is the script's: on another node it will come, too.
    least = 2 if failure.repeats(launch.failure) else EARLY_MAX
    if one is None or one.early_count < least:
        return False
    others = [o for o in launch.launchers if launch.available(o) and o.id != name]
    out = sum(1 for other in launch.launchers if other.left_out)
    few = out < max(1, len(launch.launchers) // LEFT_OUT_PART_MAX)
    return few and is_enough(launch, others)


def is_enough(launch: Launch, others: list[Launcher]) -> bool:
    """Tell whether a launch goes on with these; of an allocation, with what they have of it."""
    if launch.allocation is None:
        return len(others) >= launch.terms.nodes_min
    return 0 < launch.allocation.ranks_min <= launch.allocation.ranks_of(o.node for o in others)


def without(launch: Launch, name: str, failure: RankFailure, now_s: float) -> Launch:
    """Return the launch that goes on without a launcher, and has not paid for its failures."""
    one = launch.launcher(name)
    assert one is not None
    # Its last one was paid for already if others spoke first.
    paid = one.early_count - launch.on
    why = f"{one.early_count} times in a row before a step: {said(failure)}"
    out = replace(one, early_count=0, left_out=why, back_at_s=now_s + LEFT_OUT_S)
    return replace(
        launch.having(out),
        restarts_at_s=launch.restarts_at_s[: max(0, len(launch.restarts_at_s) - paid)],
        failure=failure,
        quick_count=0,
        again_after_s=now_s,
        cause_awaited=False,
    )


def readmitted(launch: Launch, now_s: float) -> Launch:
    """Return the launch in which who was left out for long enough may try again."""
    if not any(one.left_out and one.back_at_s <= now_s for one in launch.launchers):
        return launch
    launchers = tuple(
        replace(one, left_out="" if one.back_at_s <= now_s else one.left_out)
        for one in launch.launchers
    )
    return replace(launch, launchers=launchers)
