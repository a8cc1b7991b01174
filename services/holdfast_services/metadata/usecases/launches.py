"""The use cases of launchers: each a function of the catalogue in one transaction.

Locks are taken after the pulse: launches by job, then jobs by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.allocations import Allocation
from holdfast.core.attempts import named_nonce
from holdfast.core.rounds import LaunchRequest
from holdfast.errors import CheckpointError
from holdfast_services.metadata.domain import (
    notices,
    round_end,
    rounds,
    save_announcement,
)
from holdfast_services.metadata.domain.believed_copies import gather
from holdfast_services.metadata.domain.going_shards import notice_over
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.model import Limits, Node, Outcome, Run
from holdfast_services.metadata.domain.rounds import (
    Allocated,
    EndAsked,
    Gone,
    Reported,
    RoundEvent,
    Silent,
    Tick,
)
from holdfast_services.metadata.storage import Catalogue


@dataclass(frozen=True, slots=True)
class Ticked:
    """Whether somebody has to be told; ``hurry``: ranks may wait for their round to end."""

    told: bool
    hurry: bool


def hear(
    catalogue: Catalogue, requests: Sequence[LaunchRequest], limits: Limits
) -> tuple[list[Launch | CheckpointError], bool]:
    """Take what launchers say, all of one job in one decision after the other.

    Returns:
        For each its launch afterwards, or why it is refused; and whether somebody must be told.
    """
    now_s = catalogue.now_s()
    answers: dict[int, Launch | CheckpointError] = {}
    before: dict[str, Launch] = {}
    after: dict[str, Launch] = {}
    for job in sorted({request.report.job for request in requests}):
        before[job] = launch = catalogue.lock_launch(job)
        mine = [(i, request) for i, request in enumerate(requests) if request.report.job == job]
        heard = set()
        for index, request in mine:
            try:
                launch = _fed(catalogue, launch, _event(request), now_s, limits)
            except CheckpointError as refusal:
                answers[index] = refusal
                continue
            heard.add(request.report.launcher)
        for launcher in sorted(heard & {one.id for one in launch.launchers}):
            catalogue.renew_launcher(launcher, job, now_s + limits.node_lease_s)
        after[job] = launch
    saved, told = _saved(catalogue, before, after, now_s, limits)
    said = [answers.get(i, saved[request.report.job]) for i, request in enumerate(requests)]
    return said, told


def tick(catalogue: Catalogue, limits: Limits) -> Ticked:
    """Do what only time brings: leases that ran out, pauses that are over, steps to end after."""
    now_s = catalogue.now_s()
    before = {job: catalogue.lock_launch(job) for job in catalogue.launch_jobs()}
    timed = {job: _timed(catalogue, launch, now_s, limits) for job, launch in before.items()}
    ending = {job: launch for job, launch in timed.items() if launch.end and launch.on}
    ended = _ended(catalogue, ending, now_s, limits)
    after = {**timed, **ended.launches}
    for job, launch in after.items():
        catalogue.save_launch(before[job], launch)
    return Ticked(told=ended.told or after != before, hurry=ended.hurry)


def _saved(
    catalogue: Catalogue,
    before: Mapping[str, Launch],
    after: Mapping[str, Launch],
    now_s: float,
    limits: Limits,
) -> tuple[Mapping[str, Launch], bool]:
    """Save launches; what a round is to end after is announced at once, not with the next tick.

    Returns:
        The launches as they are then, and whether somebody must be told.
    """
    asked = {j: one for j, one in after.items() if one.end and one.on and not before[j].end}
    after = {**after, **_ended(catalogue, asked, now_s, limits).launches}
    for job, launch in after.items():
        catalogue.save_launch(before[job], launch)
    return after, after != before


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Launches by job after their rounds had to do with an end; see ``Ticked``."""

    launches: Mapping[str, Launch]
    told: bool
    hurry: bool


def _ended(
    catalogue: Catalogue, ending: Mapping[str, Launch], now_s: float, limits: Limits
) -> _Ended:
    """Announce what rounds end after, or take that back; end those whose step is safe."""
    told = hurry = False
    trained = _trained(catalogue, ending)
    nodes = catalogue.nodes() if any(trained.values()) else {}
    after = {}
    for job, launch in ending.items():
        event, changed = _end(catalogue, launch, trained[job], nodes, now_s)
        told = told or changed
        hurry = hurry or (bool(trained[job]) and round_end.is_recent(launch, now_s))
        after[job] = _fed(catalogue, launch, event, now_s, limits)
    return _Ended(launches=after, told=told, hurry=hurry)


def allocate(catalogue: Catalogue, job: str, allocation: Allocation, limits: Limits) -> bool:
    """Have the rounds of a job's launch be of an allocation; return whether that is news.

    Raises:
        StaleGenerationError: it has a newer one.
    """
    now_s = catalogue.now_s()
    launch = catalogue.lock_launch(job)
    changed = _fed(catalogue, launch, Allocated(allocation), now_s, limits)
    return _saved(catalogue, {job: launch}, {job: changed}, now_s, limits)[1]


def end_after_save(catalogue: Catalogue, job: str, event: EndAsked, limits: Limits) -> bool:
    """Have the round of a job's launch end after a step that all ranks save; is it on?"""
    launch = catalogue.lock_launch(job)
    changed = _fed(catalogue, launch, event, catalogue.now_s(), limits)
    catalogue.save_launch(launch, changed)
    return changed.end is not None


def _timed(catalogue: Catalogue, launch: Launch, now_s: float, limits: Limits) -> Launch:
    lost = catalogue.lost_launchers(launch.job, now_s)
    if lost:
        launch = _fed(catalogue, launch, Silent(lost), now_s, limits)
    return _fed(catalogue, launch, Tick(), now_s, limits)


def _trained(catalogue: Catalogue, launches: Mapping[str, Launch]) -> dict[str, list[Run]]:
    """Return the runs that each launch trains now, locked: jobs by name, after all launches."""
    jobs = {
        name: catalogue.jobs_of_attempt(named_nonce(launch.nonce))
        for name, launch in launches.items()
    }
    runs: dict[str, Run] = {}
    for job in sorted({job for each in jobs.values() for job in each}):
        run = catalogue.lock_job(job)
        loaded = catalogue.load_run(run) if run else None
        if loaded:
            runs[job] = loaded
    return {
        name: [runs[job] for job in each if job in runs and _is_of(runs[job], launches[name])]
        for name, each in jobs.items()
    }


def _is_of(run: Run, launch: Launch) -> bool:
    """Tell whether a run is trained by the round: a job may have had another attempt since."""
    attempt = run.current
    return attempt is not None and attempt.spec.nonce == named_nonce(launch.nonce)


def _end(
    catalogue: Catalogue,
    launch: Launch,
    runs: Sequence[Run],
    nodes: Mapping[str, Node],
    now_s: float,
) -> tuple[Tick, bool]:
    """Announce what a round ends after, or take that back; return what follows for the launch.

    Also whether somebody has to be told of a run.
    """
    wanted = rounds.end_wanted(launch)
    told = False
    for run in runs:
        if wanted and launch.end is not None:
            outcome = save_announcement.announce_last(run, nodes, now_s, launch.end.asked_at_s)
        else:
            outcome = Outcome(run=save_announcement.take_back(run))
        catalogue.save_run(run, outcome.run)
        catalogue.add_events(outcome.events, "", now_s)
        told = told or outcome.run != run
    if not wanted or launch.end is None:
        return Tick(taken_back=not wanted), told
    going = frozenset(one.node for one in notices.who_go(launch))
    saved = round_end.is_safe(runs, nodes, launch.end, now_s, going)
    late = not (saved or launch.silent) and notices.is_over(launch, now_s)
    for run in runs if late else ():
        evidence = gather(run.id, tuple(nodes.values()), now_s, run.stored)
        if event := notice_over(run, evidence, nodes, going, now_s):
            catalogue.add_events([event], "", now_s)
    return Tick(saved=saved, late=late), told


def _event(request: LaunchRequest) -> RoundEvent:
    if request.gone:
        return Gone(frozenset({request.report.launcher}))
    return Reported(request.report, request.node, request.address)


def _fed(
    catalogue: Catalogue, launch: Launch, event: RoundEvent, now_s: float, limits: Limits
) -> Launch:
    changed, news = rounds.handle(launch, event, now_s=now_s, lease_s=limits.node_lease_s)
    catalogue.add_events(news, "", now_s)
    return changed
