"""What launchers, and people, are told of a launch: its round, its end, or what is waited for."""

from __future__ import annotations

from holdfast.core.rounds import Ending, LaunchView
from holdfast_services.metadata.domain import allocated
from holdfast_services.metadata.domain.launch import Launch, Launcher
from holdfast_services.metadata.domain.round_news import UNHEARD

POLLS_PER_LEASE = 4


def view(launch: Launch, name: str, *, lease_s: float) -> LaunchView:
    """Return what a launcher should know."""
    known = launch.launcher(name)
    return LaunchView(
        launch=launch.id,
        place=launch.place(name),
        waiting=_waiting(launch, name),
        stop=launch.stopping and known is not None,
        ending=_ending(launch, known) if known else None,
        port_taken=launch.master_port if known and known.address == launch.master_address else 0,
        poll_s=lease_s / POLLS_PER_LEASE,
        goes=known is not None and known.goes_at_s > 0,
    )


def _ending(launch: Launch, known: Launcher) -> Ending | None:
    """Return how a launch has ended, or that it goes on without this launcher."""
    if launch.ending is None and allocated.is_released(launch, known):
        return allocated.RELEASED
    return launch.ending


def _waiting(launch: Launch, name: str) -> str:
    known = launch.launcher(name)
    if known is None:
        return "the launch before this one is ending"
    if launch.ending or launch.stopping:
        return ""
    if launch.place(name):
        return _unheard(launch)
    if allocated.is_awaited(launch):
        return "nobody has said yet which nodes take part"
    if known.left_out:
        return f"this node is left out for an hour, as its ranks failed {known.left_out}"
    return awaited(launch)


def awaited(launch: Launch) -> str:
    """Return what those without a place wait for."""
    least, most = launch.terms.nodes_min, launch.terms.nodes_max
    if launch.allocation is not None:
        return _missing(launch)
    if unheard := _unheard(launch):
        return unheard
    if launch.on:
        full = len(launch.members) >= most
        many = f"{most} nodes train, as many as may: this one waits in reserve"
        return many if full else "this node takes part after a step that all ranks save"
    if launch.cause_awaited:
        return "a rank has lost another one: waiting to hear which node failed"
    here = sum(1 for one in launch.launchers if launch.available(one))
    if here >= least and launch.quick_count > 1:
        return "rounds failed one soon after the other: there is a pause before the next"
    needed = f"{least}" if least == most else f"{least} to {most}"
    return f"waiting for nodes: {here} of {needed} are here"


def _unheard(launch: Launch) -> str:
    """Return who is not heard, and what becomes of the round."""
    silent = [one.node for one in launch.silent]
    if not silent or not launch.on or launch.stopping:
        return ""
    more = f" and {len(silent) - 1} more" if silent[1:] else ""
    return f"node {silent[0]}{more} {UNHEARD}"


def _missing(launch: Launch) -> str:
    """Return what the newest allocation waits for."""
    assert launch.allocation is not None
    here = {one.node for one in allocated.ready(launch)}
    missing = [one.node for one in launch.allocation.shares if one.node not in here]
    if missing:
        return f"waiting for the launchers of {', '.join(missing)}"
    return "waiting for a step that all ranks save" if launch.on else "about to begin"
