"""The decision about rounds: ``handle`` a report, a loss or the time.

A launcher that nobody knows any more simply comes anew: its report names its round by a nonce, and
what is said of another round than the last counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.core.allocations import Allocation
from holdfast.core.retry import Waits
from holdfast.core.rounds import Ending, LauncherReport, RankFailure
from holdfast.core.user_events import Event
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain import allocated, left_out, notices
from holdfast_services.metadata.domain.launch import (
    EndReason,
    Launch,
    Launcher,
    Member,
    RoundEnd,
)
from holdfast_services.metadata.domain.round_news import news, said

QUICK_S = 10.0
"""A round that fails sooner than this is quick: after two in a row there is a pause."""
QUICK_WAITS = Waits(first_s=1.0, wait_s_max=30.0)
BUDGET_S = 3600.0
SILENT_S_MAX = 3600.0
"""After so long a launch of which nobody is heard is forgotten."""
_AGAIN = "the second time in a row, at the same step: this is not restarted"


@dataclass(frozen=True, slots=True)
class Reported:
    """A launcher's report, as the agent of its node, which has ``address``, passed it on."""

    report: LauncherReport
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Launchers that have ended without a word, as their agent saw."""

    launchers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Silent:
    """Launchers whose leases have run out: they are lost, or only their agents are away."""

    launchers: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed.

    ``saved``: the step is safe that the round was to end after. ``late``: it is not, and there is
    no time to wait for it. ``taken_back``: all ranks were told that the round goes on after it.
    """

    saved: bool = False
    late: bool = False
    taken_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked:
    """Somebody wants the round to end after a step that is saved; see ``RoundEnd``."""

    reason: EndReason
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    """Somebody says who takes part from now on."""

    allocation: Allocation


RoundEvent: TypeAlias = Reported | Gone | Silent | Tick | EndAsked | Allocated


def handle(
    launch: Launch, event: RoundEvent, *, now_s: float, lease_s: float
) -> tuple[Launch, tuple[Event, ...]]:
    """Return the launch after ``event``, and the news of it.

    Raises:
        AlreadyExistsError: another launch has the job's name, or another launcher this node.
        StaleGenerationError: the launch has a newer allocation.
    """
    before = launch
    launch = _no_later_than(launch, now_s, lease_s)
    launch = left_out.readmitted(launch, now_s)
    if isinstance(event, Reported):
        launch = _reported(launch, event, now_s, lease_s)
    elif isinstance(event, Gone):
        launch = _without(launch, event.launchers, now_s)
    elif isinstance(event, Silent):
        launch = _silenced(launch, event.launchers, now_s)
    elif isinstance(event, EndAsked):
        launch = _end_asked(launch, event, now_s)
    elif isinstance(event, Allocated):
        launch = allocated.put(launch, event.allocation)
    elif (event.saved or event.late) and end_wanted(launch) and not launch.silent:
        launch = _over(launch)
    elif event.taken_back and not end_wanted(launch):
        launch = replace(launch, end=None)
    launch = _begun(_given_up(launch, now_s), now_s)
    launch = notices.wished(launch, now_s)
    launch = allocated.rescaling(_growing(launch, now_s), now_s)
    return launch, news(before, launch)


def _no_later_than(launch: Launch, now_s: float, lease_s: float) -> Launch:
    """Return the launch with no time that is still to come: the clock may have been set back."""
    again_s = now_s + max(lease_s, QUICK_WAITS.wait_s_max)
    told_s = (max(one.joined_at_s, one.silent_since_s) for one in launch.launchers)
    latest_s = max(launch.began_at_s, launch.enough_since_s, *told_s)
    if latest_s <= now_s and launch.again_after_s <= again_s:
        return launch
    back_s = now_s + left_out.LEFT_OUT_S
    launchers = tuple(
        replace(
            one,
            joined_at_s=min(one.joined_at_s, now_s),
            back_at_s=min(one.back_at_s, back_s),
            silent_since_s=one.silent_since_s and min(one.silent_since_s, now_s),
        )
        for one in launch.launchers
    )
    end = launch.end and replace(launch.end, asked_at_s=min(launch.end.asked_at_s, now_s))
    return replace(
        launch,
        launchers=launchers,
        end=end,
        began_at_s=min(launch.began_at_s, now_s),
        enough_since_s=min(launch.enough_since_s, now_s),
        again_after_s=min(launch.again_after_s, again_s),
    )


def may_grow(launch: Launch) -> bool:
    """Tell whether somebody waits whom the round that is on has room for."""
    if launch.allocation is not None:
        return False
    room = len(launch.members) < launch.terms.nodes_max
    waits = bool(_waiting_for_a_place(launch))
    return launch.on and room and waits and not launch.stopping


def end_wanted(launch: Launch) -> bool:
    """Tell whether the round that is on is to end after a step that is saved."""
    if launch.end is None or not launch.on or launch.stopping:
        return False
    if launch.end.reason is EndReason.RESCALE and launch.allocation is not None:
        return allocated.may_rescale(launch)
    if launch.end.reason is EndReason.NOTICE:
        return bool(notices.who_go(launch))
    return launch.end.reason is not EndReason.GROWTH or may_grow(launch)


def _growing(launch: Launch, now_s: float) -> Launch:
    """Return the launch with the wish to take in who waits, if it has room and no other wish."""
    if launch.end is not None or not may_grow(launch):
        return launch
    return replace(launch, end=RoundEnd(reason=EndReason.GROWTH, asked_at_s=now_s))


def _end_asked(launch: Launch, event: EndAsked, now_s: float) -> Launch:
    """Return the launch with the wish; between two rounds there is nothing to end."""
    if not launch.on or launch.stopping:
        return launch
    copied = event.copied or (launch.end is not None and launch.end.copied)
    return replace(launch, end=RoundEnd(reason=event.reason, asked_at_s=now_s, copied=copied))


def _waiting_for_a_place(launch: Launch) -> list[Launcher]:
    here = [one for one in launch.launchers if launch.available(one)]
    return [one for one in here if not launch.takes_part(one.id)]


# -------------------------------------------------------------------------------- what is said


def _reported(launch: Launch, event: Reported, now_s: float, lease_s: float) -> Launch:
    report = event.report
    known = launch.launcher(report.launcher)
    if known is None:
        return launch if report.left else _joined(launch, event, now_s, lease_s)
    known = replace(known, silent_since_s=0.0)
    launch = launch.having(known)
    if report.sequence <= known.sequence:
        return launch
    if report.left:
        return _without(launch, frozenset({known.id}), now_s)
    told = replace(
        known,
        sequence=report.sequence,
        port=report.port,
        address=event.address,
        finished=report.finished and report.round == launch.nonce,
        stopping=report.stopping,
        round=report.round,
        warm=report.warm,
        goes_at_s=notices.goes_at_s(known.goes_at_s, report.goes_in_s, now_s),
    )
    launch = launch.having(told)
    if report.stopping and not known.stopping:
        launch = _asked_to_stop(launch, told.id)
    if report.round != launch.nonce or not launch.takes_part(told.id):
        return launch
    if report.failure and not told.stopping:
        launch = _failed(launch, told, report.failure, now_s, lease_s)
    elif launch.on and all(_has_finished(launch, member) for member in launch.members):
        launch = replace(launch, ending=Ending(code=0), on=False, end=None)
    return launch


def _joined(launch: Launch, event: Reported, now_s: float, lease_s: float) -> Launch:
    report = event.report
    launch = _without(launch, _replaced(launch, event), now_s)
    if not launch.launchers:
        # Of the same launcher, once it was given up, it is another launch with other nonces.
        name = f"{report.launcher[:16]}.{int(now_s * 1000):x}"
        launch = Launch(job=report.job, id=name, terms=report.terms, allocation=launch.allocation)
    if launch.terms != report.terms:
        other = launch.launchers[0]
        raise AlreadyExistsError(
            f"another launch has the name {launch.job} now: {other.holder} on node {other.node}, "
            f"with another command or other options; stop it, or pass --job NAME",
            job=launch.job,
            holder=other.holder,
            lease_s=lease_s,
        )
    for other in launch.launchers:
        if other.node == event.node:
            raise AlreadyExistsError(
                f"node {event.node} has a launcher of {launch.job} already: {other.holder}; with "
                f"another --job it runs beside that one",
                job=launch.job,
                node=event.node,
                holder=other.holder,
                lease_s=lease_s,
            )
    if launch.ending or launch.stopping:
        return launch
    joined = Launcher(
        id=report.launcher,
        sequence=report.sequence,
        node=event.node,
        address=event.address,
        holder=report.holder,
        ranks=report.ranks,
        port=report.port,
        joined_at_s=now_s,
        stopping=report.stopping,
        warm=report.warm,
        goes_at_s=notices.goes_at_s(0.0, report.goes_in_s, now_s),
    )
    return replace(launch, launchers=(*launch.launchers, joined))


def _replaced(launch: Launch, event: Reported) -> frozenset[str]:
    """Return the launchers that are not heard and have no claim any more: another one is here."""
    silent = {one.id: one.node for one in launch.silent}
    # Who is heard has the name, and refuses another command; who has ended has none.
    over = bool(launch.ending or launch.stopping) and len(silent) == len(launch.launchers)
    other = over or launch.terms != event.report.terms
    return frozenset(name for name, node in silent.items() if other or node == event.node)


def _has_finished(launch: Launch, member: Member) -> bool:
    launcher = launch.launcher(member.launcher)
    return launcher is not None and launcher.finished


def _without(launch: Launch, names: frozenset[str], now_s: float) -> Launch:
    """Return the launch without launchers; if one took part in the round, that is over."""
    lost = [one for one in launch.launchers if one.id in names]
    launch = replace(launch, launchers=tuple(o for o in launch.launchers if o.id not in names))
    if not any(launch.takes_part(one.id) for one in lost):
        return launch
    nodes = ", ".join(one.node for one in lost)
    failure = RankFailure(rank=-1, code=1, reason=f"node {nodes} is lost", outside=True)
    expected = all(one.stopping or one.goes_at_s for one in lost)
    if launch.on and not launch.stopping and not expected:
        return _restarted(launch, failure, now_s, 0.0)
    if launch.cause_awaited:
        launch = replace(launch, failure=failure, cause_awaited=False, again_after_s=0.0)
    if launch.on and any(one.goes_at_s for one in lost):
        return replace(_over(launch), enough_since_s=notices.LONG_AGO_S)
    return _over(launch)


def _silenced(launch: Launch, names: frozenset[str], now_s: float) -> Launch:
    """Return the launch of which leases have run out: ranks of the last round may train on.

    A node that was to be taken away has been.
    """
    gone = {one.id for one in notices.who_go(launch)}
    silent = frozenset(n for n in names - gone if launch.takes_part(n))
    launch = _without(launch, names - silent, now_s)
    if launch.on and silent and not launch.silent:
        launch = replace(launch, enough_since_s=0.0)
    for one in launch.launchers:
        if one.id in silent and not one.silent_since_s:
            launch = launch.having(replace(one, silent_since_s=now_s))
    return launch


def _given_up(launch: Launch, now_s: float) -> Launch:
    """Return the launch without who is not heard, once another round can begin.

    Until then nothing is won by ending theirs, and if only an agent was away nothing was lost. Who
    is heard after the launch has ended, or was told to, is told so. One that all are silent of is
    forgotten after long.
    """
    if not launch.silent:
        return launch
    without = _without(launch, frozenset(one.id for one in launch.silent), now_s)
    next_one = _begun(replace(without, enough_since_s=launch.enough_since_s), now_s)
    needed = launch.on or launch.stopping or launch.ending is not None
    if next_one.on or not needed:
        return next_one
    heard_s = max(one.silent_since_s or now_s for one in launch.launchers)
    if heard_s + SILENT_S_MAX <= now_s:
        return without
    return replace(launch, enough_since_s=next_one.enough_since_s)


def _over(launch: Launch) -> Launch:
    """Return the launch without a round: nodes are waited for anew, but for one that goes."""
    if not launch.on:
        return launch
    since_s = notices.LONG_AGO_S if notices.who_go(launch) else 0.0
    return replace(launch, on=False, enough_since_s=since_s, end=None)


def _asked_to_stop(launch: Launch, name: str) -> Launch:
    """Return the launch of which a launcher was told to end: so do all, if too few were left."""
    left = sum(1 for one in launch.launchers if not one.stopping)
    if launch.on and launch.takes_part(name) and left < launch.terms.nodes_min:
        return replace(launch, stopping=True)
    return launch


def _failed(
    launch: Launch, launcher: Launcher, failure: RankFailure, now_s: float, lease_s: float
) -> Launch:
    told = launch.on or (launch.cause_awaited and not failure.of_peer)
    if launch.stopping or not told:
        return launch
    launch = left_out.counted(launch, launcher.id, failure, now_s)
    if left_out.is_due(launch, launcher.id, failure):
        return _over(left_out.without(launch, launcher.id, failure, now_s))
    if launch.on:
        wait_s = lease_s if failure.of_peer else 0.0
        return _restarted(launch, failure, now_s, wait_s)
    # What the first that spoke had lost; the round has been counted.
    if failure.repeats(launch.failure):
        return _ended(launch, failure, _AGAIN)
    return replace(launch, cause_awaited=False, again_after_s=now_s, failure=failure)


def _restarted(launch: Launch, failure: RankFailure, now_s: float, wait_s: float) -> Launch:
    """Return the launch whose round has failed: it begins again, or has failed for good."""
    recent = tuple(at_s for at_s in launch.restarts_at_s if now_s - BUDGET_S < at_s <= now_s)
    if failure.repeats(launch.failure):
        return _ended(launch, failure, _AGAIN)
    if len(recent) >= launch.terms.restarts_max:
        return _ended(launch, failure, f"restarts in the last hour: {len(recent)}, --max-restarts")
    quick_count = launch.quick_count + 1 if now_s - launch.began_at_s < QUICK_S else 0
    pause_s = QUICK_WAITS.wait_s(quick_count - 1) if quick_count > 1 else 0.0
    return replace(
        _over(launch),
        restarts_at_s=(*recent, now_s),
        failure=launch.failure if failure.of_peer else failure,
        quick_count=quick_count,
        again_after_s=now_s + max(wait_s, pause_s),
        cause_awaited=failure.of_peer,
    )


def _ended(launch: Launch, failure: RankFailure, why: str) -> Launch:
    """Return the launch that ends by ``failure``."""
    detail = f"\n{failure.detail}" if failure.detail else ""
    reason = f"{said(failure)} ({why}){detail}"
    ending = Ending(code=failure.exit_code, reason=reason, outside=failure.outside)
    return replace(launch, on=False, cause_awaited=False, failure=failure, ending=ending, end=None)


# ------------------------------------------------------------------------------- the next round


def _begun(launch: Launch, now_s: float) -> Launch:
    """Return the launch with the next round, if there is to be one now."""
    if launch.on or launch.stopping or launch.ending or allocated.is_awaited(launch):
        return launch
    ready = _ready(launch)
    if len(ready) < launch.terms.nodes_min:
        return replace(launch, enough_since_s=0.0)
    launch = replace(launch, enough_since_s=launch.enough_since_s or now_s)
    if now_s < launch.again_after_s or not _may_begin(launch, ready, now_s):
        return launch
    members = _members(launch, ready)
    first = next(one for one in ready if one.id == members[0].launcher)
    launchers = tuple(replace(one, finished=False) for one in launch.launchers)
    return replace(
        launch,
        launchers=launchers,
        number=launch.number + 1,
        members=members,
        master_address=first.address,
        master_port=first.port,
        on=True,
        began_at_s=now_s,
        cause_awaited=False,
        allocated=launch.allocation.number if launch.allocation else 0,
    )


def _ready(launch: Launch) -> list[Launcher]:
    """Return the launchers that a round may begin with."""
    if launch.allocation is not None:
        return allocated.ready(launch)
    return [one for one in launch.launchers if launch.available(one)]


def _may_begin(launch: Launch, ready: list[Launcher], now_s: float) -> bool:
    """Tell whether there are as many as are waited for, or it has been waited long enough."""
    if launch.allocation is not None:
        return allocated.may_begin(launch, now_s)
    waited = now_s >= launch.enough_since_s + launch.terms.shrink_after_s
    as_before = bool(launch.members) and len(ready) >= len(launch.members)
    return waited or as_before or len(ready) >= launch.terms.nodes_max


def _members(launch: Launch, ready: list[Launcher]) -> tuple[Member, ...]:
    """Return who sits where: who sat keeps the member; a free one goes to its own node first."""
    here = {one.id: one for one in ready}
    members: list[Launcher | None] = [here.pop(member.launcher, None) for member in launch.members]
    for index, member in enumerate(launch.members):
        back = next((one for one in here.values() if one.node == member.node), None)
        if members[index] is None and back is not None:
            members[index] = here.pop(back.id)
    waiting = list(here.values())
    filled = [one or (waiting.pop(0) if waiting else None) for one in members]
    ordered = [*(one for one in filled if one), *waiting][: launch.terms.nodes_max]
    if launch.allocation is not None:
        return tuple(allocated.member(launch, one) for one in ordered)
    return tuple(Member(launcher=one.id, node=one.node, ranks=one.ranks) for one in ordered)
