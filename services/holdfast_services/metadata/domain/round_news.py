"""What people are told of a launch: how it differs from before, as events."""

from __future__ import annotations

from holdfast.core.rounds import RankFailure
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.launch import Launch

UNHEARD = "is not heard: the round goes on until another one can begin"


def said(failure: RankFailure) -> str:
    """Return a failure in one line."""
    who = f"rank {failure.rank}: " if failure.rank >= 0 else ""
    step = f" at step {failure.step}" if failure.step >= 0 else ""
    return f"{who}{failure.reason}{step}"


def news(before: Launch, after: Launch) -> tuple[Event, ...]:
    """Return what there is to tell of a decision."""
    events: list[Event] = []
    lost = {one.id: one for one in before.launchers} if before.id == after.id else {}
    for one in after.launchers:
        lost.pop(one.id, None)
    if after.ending is None and not after.stopping:
        texts = [f"node {one.node} takes no part any more" for one in lost.values()]
        events += [_event(after, "launcher_left", "info", text) for text in texts]
    if after.restarts_at_s != before.restarts_at_s and after.failure and not after.cause_awaited:
        text = f"round {after.number} is over: {said(after.failure)}"
        events.append(_event(after, "round_failed", "warning", text))
    elif before.end and before.on and not lost and not _goes_on(before, after):
        text = f"round {before.number} ends after a step that was saved: {before.end.reason.text}"
        events.append(_event(after, "round_ended", "info", text))
    was = {one.id: one.left_out for one in before.launchers}
    for one in after.launchers:
        if one.left_out and not was.get(one.id):
            text = f"node {one.node} is left out for an hour: its ranks failed {one.left_out}"
            events.append(_event(after, "node_left_out", "warning", text))
    events += _silence(before, after)
    events += _notices(before, after)
    if after.number > before.number and after.on:
        nodes, ranks = len(after.members), sum(member.ranks for member in after.members)
        text = f"round {after.number} begins: {ranks} ranks on {nodes} nodes"
        events.append(_event(after, "round_began", "info", text))
    if after.stopping and not before.stopping:
        text = "all ranks are told to save and to end, since fewer nodes than it needs were left"
        events.append(_event(after, "launch_stopping", "info", text))
    if after.ending and not before.ending and after.ending.code:
        line = after.ending.reason.partition("\n")[0]
        events.append(_event(after, "launch_failed", "error", line))
    return tuple(events)


def _notices(before: Launch, after: Launch) -> list[Event]:
    """Return who will be taken away, and was not to be before."""
    told = {one.id for one in before.launchers if one.goes_at_s}
    nodes = [one.node for one in after.launchers if one.goes_at_s and one.id not in told]
    return [_event(after, "node_goes", "warning", f"node {n} will be taken away") for n in nodes]


def _silence(before: Launch, after: Launch) -> list[Event]:
    """Return who is not heard any more, or is again."""
    was = {one.id for one in before.silent}
    now = {one.id: one.node for one in after.silent}
    goes_on = after.on and not after.stopping
    lost = [node for name, node in now.items() if name not in was and goes_on]
    back = [one.node for one in after.launchers if one.id in was - now.keys()]
    return [
        *(_event(after, "node_unheard", "warning", f"node {node} {UNHEARD}") for node in lost),
        *(_event(after, "node_heard", "info", f"node {node} is heard again") for node in back),
    ]


def _goes_on(before: Launch, after: Launch) -> bool:
    """Tell whether the round goes on that was on before, or the launch has ended with it."""
    over = not after.on or after.number > before.number
    return not over or after.ending is not None or after.stopping


def _event(launch: Launch, kind: str, severity: str, message: str) -> Event:
    return Event(kind=kind, severity=severity, message=f"{launch.job}: {message}", job=launch.job)
