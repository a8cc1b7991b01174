"""A launch of which somebody else decides who takes part: the scheduler, by allocations.

A round then is of exactly the nodes of the newest allocation, with as many ranks as it says. One
that is on and is of another ends after a step that is saved, once all launchers of the new one are
here, so that training goes on while they start.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.allocations import Allocation
from holdfast.core.rounds import Ending
from holdfast.errors import StaleGenerationError
from holdfast_services.metadata.domain.launch import (
    EndReason,
    Launch,
    Launcher,
    Member,
    RoundEnd,
)

WARM_S_MAX = 120.0
"""Longer is not waited for a newcomer to import what its ranks need."""
RELEASED = Ending(code=0, reason="this node takes no part any more", released=True)


def put(launch: Launch, allocation: Allocation) -> Launch:
    """Return the launch with an allocation; the same launch if it has it already.

    With an empty one a round that is on is told to save and to end.

    Raises:
        StaleGenerationError: it has a newer one; names the number.
    """
    known = launch.allocation
    if known is not None and known.number >= allocation.number:
        if known == allocation:
            return launch
        raise StaleGenerationError(
            f"launch {launch.job} has allocation {known.number}, which is not older than "
            f"{allocation.number}",
            job=launch.job,
            number=known.number,
        )
    stops = launch.on and not allocation.shares
    stopping = launch.stopping or stops
    return replace(launch, allocation=allocation, stopping=stopping, enough_since_s=0.0)


def is_awaited(launch: Launch) -> bool:
    """Tell whether no round may begin since nobody has said yet who takes part."""
    return launch.terms.allocated and launch.allocation is None


def is_met(launch: Launch) -> bool:
    """Tell whether the last round is of the nodes and ranks of the allocation."""
    assert launch.allocation is not None
    wanted = {one.node: (one.ranks, one.devices) for one in launch.allocation.shares}
    return wanted == {one.node: (one.ranks, one.devices) for one in launch.members}


def ready(launch: Launch) -> list[Launcher]:
    """Return the launchers of the allocation that are here, in the order in which they came."""
    assert launch.allocation is not None
    return [
        one
        for one in launch.launchers
        if launch.available(one) and launch.allocation.share(one.node) is not None
    ]


def may_begin(launch: Launch, now_s: float) -> bool:
    """Tell whether a round of the allocation may begin now.

    All its launchers must be here. If some do not come for as long as a launch waits for more
    nodes, or are left out, those that are here go on if they are enough: who decides about nodes
    may be away.
    """
    allocation = launch.allocation
    assert allocation is not None
    here = {one.node for one in ready(launch)}
    missing = [one.node for one in allocation.shares if one.node not in here]
    if not allocation.shares or not missing:
        return bool(allocation.shares)
    ranks = allocation.ranks_of(here)
    out = {one.node for one in launch.launchers if one.left_out}
    waited = now_s >= launch.enough_since_s + launch.terms.shrink_after_s
    enough = 0 < allocation.ranks_min <= ranks
    return enough and (out.issuperset(missing) or (launch.enough_since_s > 0 and waited))


def member(launch: Launch, launcher: Launcher) -> Member:
    """Return the part of a round that the allocation gives to a launcher."""
    assert launch.allocation is not None
    share = launch.allocation.share(launcher.node)
    assert share is not None
    return Member(
        launcher=launcher.id, node=launcher.node, ranks=share.ranks, devices=share.devices
    )


def may_rescale(launch: Launch) -> bool:
    """Tell whether the round that is on may give way to one of the whole allocation."""
    allocation = launch.allocation
    if allocation is None or not allocation.shares or not launch.on or launch.stopping:
        return False
    return not is_met(launch) and len(ready(launch)) == len(allocation.shares)


def rescaling(launch: Launch, now_s: float) -> Launch:
    """Return the launch that knows of what allocation its round is, and wishes for another."""
    if launch.allocation is None:
        return launch
    if launch.on and is_met(launch):
        launch = replace(launch, allocated=launch.allocation.number)
    if launch.end is not None and launch.end.reason is not EndReason.GROWTH:
        return launch  # the round that follows is of the allocation, whatever this one ends for
    if may_rescale(launch) and _is_warm(launch, now_s):
        end = RoundEnd(reason=EndReason.RESCALE, asked_at_s=now_s)
        return replace(launch, end=end)
    return launch


def _is_warm(launch: Launch, now_s: float) -> bool:
    """Tell whether newcomers would begin at once: until then training goes on without them."""
    newcomers = [one for one in ready(launch) if not launch.takes_part(one.id)]
    return all(one.warm or now_s >= one.joined_at_s + WARM_S_MAX for one in newcomers)


def is_released(launch: Launch, launcher: Launcher) -> bool:
    """Tell whether a launcher is to end since no round will be of its node."""
    allocation = launch.allocation
    if allocation is None or allocation.share(launcher.node) is not None:
        return False
    return not (launch.on and launch.takes_part(launcher.id))


def begun(launch: Launch) -> bool:
    """Tell whether all launchers of the round that is on run its ranks."""
    said = {one.id: one.round for one in launch.launchers}
    return launch.on and all(said.get(one.launcher) == launch.nonce for one in launch.members)
