"""The use cases of launchers: each a function of the catalogue in one transaction.

Locks are taken after the pulse: launches by job.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.attempts import named_nonce
from holdfast.core.rounds import LaunchRequest
from holdfast.errors import CheckpointError
from holdfast_services.metadata.domain import rounds
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.domain.rounds import Gone, Reported, RoundEvent, Tick
from holdfast_services.metadata.storage import Catalogue


def hear(
    catalogue: Catalogue, requests: Sequence[LaunchRequest], limits: Limits
) -> tuple[list[Launch | CheckpointError], bool]:
    """Take what launchers say, all of one job in one decision after the other.

    Returns:
        For each its launch afterwards, or why it is refused; and whether somebody must be told.
    """
    now_s = catalogue.now_s()
    answers: dict[int, Launch | CheckpointError] = {}
    changed = False
    for job in sorted({request.report.job for request in requests}):
        before = launch = catalogue.lock_launch(job)
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
        catalogue.save_launch(before, launch)
        answers |= {i: launch for i, _ in mine if i not in answers}
        changed = changed or launch != before
    return [answers[index] for index in range(len(requests))], changed


def tick(catalogue: Catalogue, limits: Limits) -> bool:
    """Do what only time brings: leases that ran out, pauses that are over, steps to grow at.

    Returns:
        Whether somebody has to be told.
    """
    now_s = catalogue.now_s()
    changed = False
    for job in catalogue.launch_jobs():
        before = launch = catalogue.lock_launch(job)
        lost = catalogue.lost_launchers(job, now_s)
        if lost:
            launch = _fed(catalogue, launch, Gone(lost), now_s, limits)
        launch = _fed(catalogue, launch, Tick(saved=_saved(catalogue, launch)), now_s, limits)
        catalogue.save_launch(before, launch)
        changed = changed or launch != before
    return changed


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


def _saved(catalogue: Catalogue, launch: Launch) -> bool:
    """Tell whether there is a step to go on from that is newer than who waits for a place."""
    if not rounds.may_grow(launch):
        return False
    return catalogue.saved_at_s(named_nonce(launch.nonce)) > rounds.waits_since_s(launch)
