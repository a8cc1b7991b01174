"""Nodes that will be taken away: when, and whether a launch goes on without them (ADR 0077).

A *notice* is what a launcher says of its node. It holds for as long as the launcher says so; a
launcher that has gone has none, and one that is started there comes as any other.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_services.metadata.domain import left_out
from holdfast_services.metadata.domain.launch import EndReason, Launch, Launcher, RoundEnd

LONG_AGO_S = 1.0
"""Since then others are awaited for the round after a notice: it begins with those who stay."""


def goes_at_s(known_s: float, goes_in_s: float, now_s: float) -> float:
    """Return when a node goes whose launcher says so now, and said ``known_s``; 0: it stays.

    A report that says the same once more makes it no later.
    """
    if not goes_in_s:
        return 0.0
    return min(known_s or now_s + goes_in_s, now_s + goes_in_s)


def who_go(launch: Launch) -> tuple[Launcher, ...]:
    """Return the launchers of the last round whose nodes will be taken away."""
    return tuple(o for o in launch.launchers if o.goes_at_s and launch.takes_part(o.id))


def wished(launch: Launch, now_s: float) -> Launch:
    """Return the launch whose round ends as a node of it goes; with too few others it stops."""
    if not launch.on or not who_go(launch):
        return launch
    others = [o for o in launch.launchers if not (o.goes_at_s or o.stopping or o.left_out)]
    if not left_out.is_enough(launch, others):
        return replace(launch, stopping=True)
    if launch.end is not None and launch.end.reason is EndReason.NOTICE:
        return launch
    end = RoundEnd(reason=EndReason.NOTICE, asked_at_s=now_s, copied=True)
    return replace(launch, end=end)


def is_over(launch: Launch, now_s: float) -> bool:
    """Tell whether the notice of a node of the round is over: nothing is waited for any more."""
    return any(one.goes_at_s <= now_s for one in who_go(launch))
