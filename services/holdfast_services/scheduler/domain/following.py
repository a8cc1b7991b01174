"""What a job becomes by what executors and the metadata service say of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.core.executions import LaunchState, Outcome
from holdfast_services.scheduler.domain import retries
from holdfast_services.scheduler.domain.cluster import Cluster, Round
from holdfast_services.scheduler.domain.job import (
    Held,
    Job,
    Part,
    State,
    granted,
    moved,
    released,
)
from holdfast_services.scheduler.domain.numbers import Numbers

START_S_MAX = 300.0
"""From a grant to its round: a cold cache of a file system, and torch, on a busy node."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A start has failed on a node, and nothing else explains it."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Followed:
    """A job after the news, nodes that may be bad, and nodes on which its ranks have begun."""

    job: Job
    strikes: tuple[Strike, ...] = ()
    good: tuple[str, ...] = ()


def follow(job: Job, cluster: Cluster, numbers: Numbers, now_s: float) -> Followed:
    """Return what becomes of a job now."""
    job = replace(job, held=tuple(h for h in job.held if not _is_free(job, h, cluster)))
    job = _in_step(job, cluster, numbers)
    if job.over:
        return Followed(job)
    if job.cancel:
        job = released(job, numbers.next(), now_s) if job.parts else job
        return Followed(moved(job, State.CANCELLED, now_s, job.cancel))
    if not job.parts:
        return Followed(job)
    begun = _begun(job, cluster)
    good = tuple(begun.shares) if begun is not job else ()
    followed = _endings(begun, cluster, numbers, now_s)
    if followed.job is begun:
        followed = _losses(begun, cluster, numbers, now_s)
    if followed.job is begun:
        followed = _overdue(begun, cluster, numbers, now_s)
    if followed.job is begun and begun is not job:
        running = moved(begun, State.RUNNING, now_s)
        return Followed(replace(running, began_at_s=running.began_at_s or now_s), good=good)
    return replace(followed, good=good)


def _in_step(job: Job, cluster: Cluster, numbers: Numbers) -> Job:
    """Return the job under a number that counts, if metadata has one that nobody here has given.

    So it is after the scheduler's database was lost, or came back from a backup.
    """
    ahead = _round(job, cluster).newest > job.number
    return replace(job, number=numbers.next()) if ahead else job


def _round(job: Job, cluster: Cluster) -> Round:
    return (cluster.rounds or {}).get(job.name, Round())


def _begun(job: Job, cluster: Cluster) -> Job:
    """Return the job whose round has begun; the same one if it has not, or was known."""
    found = _round(job, cluster)
    if not found.begun or found.number != job.number or job.state is State.RUNNING:
        return job
    return replace(job, ran=found.number, starts=job.starts + 1, refused_count=0)


def _is_free(job: Job, held: Held, cluster: Cluster) -> bool:
    """Tell whether nothing of the job is on these GPUs any more, for certain."""
    node = cluster.nodes.get(held.node)
    if node is None or node.gone:
        return True  # nobody begins anything there; and if it comes back, what runs there is seen
    state = node.state(job.name, held.start)
    if state is not None and state.outcome is not Outcome.RUNNING:
        return True
    if state is None and node.applied >= held.number:
        return True
    part = job.part(held.node)
    if part is None or part.start != held.start:
        return False
    found = _round(job, cluster)
    return found.begun and found.number >= held.number


# ---------------------------------------------------------------------------- launchers that ended


def _endings(job: Job, cluster: Cluster, numbers: Numbers, now_s: float) -> Followed:
    ended = list(_ended(job, cluster))
    by_outcome = {state.outcome: (part, state) for part, state in reversed(ended)}
    if Outcome.ENDED in by_outcome:
        return Followed(moved(released(job, numbers.next(), now_s), State.ENDED, now_s))
    if Outcome.FAILED in by_outcome:
        part, state = by_outcome[Outcome.FAILED]
        return Followed(retries.of_script(job, _said(part, state), numbers.next(), now_s))
    if Outcome.REFUSED in by_outcome:
        return _refused(job, *by_outcome[Outcome.REFUSED], numbers, now_s)
    return _from_outside(job, ended, cluster, numbers, now_s) if ended else Followed(job)


def _from_outside(
    job: Job,
    ended: list[tuple[Part, LaunchState]],
    cluster: Cluster,
    numbers: Numbers,
    now_s: float,
) -> Followed:
    for part, state in ended:
        if state.outcome is Outcome.OUTSIDE:  # the whole launch has ended
            return Followed(retries.from_outside(job, _said(part, state), numbers.next(), now_s))
    if job.state is State.STARTING:
        strikes = tuple(Strike(part.node, _said(part, state)) for part, state in ended)
        reason = _said(*ended[0])
        return Followed(retries.from_outside(job, reason, numbers.next(), now_s), strikes)
    return Followed(_started_again(job, ended, cluster, numbers, now_s))


def _ended(job: Job, cluster: Cluster) -> Iterable[tuple[Part, LaunchState]]:
    for part in job.parts:
        node = cluster.nodes.get(part.node)
        state = node.state(job.name, part.start) if node else None
        if state is not None and state.outcome is not Outcome.RUNNING:
            yield part, state


def _said(part: Part, state: LaunchState) -> str:
    reason = state.reason or f"exit code {state.code}"
    return f"node {part.node}: {reason}" if state.outcome is not Outcome.FAILED else reason


def _refused(job: Job, part: Part, state: LaunchState, numbers: Numbers, now_s: float) -> Followed:
    """Return the job of which a launcher could not begin: once it may be the node's fault."""
    reason = _said(part, state)
    if job.refused_count:
        return Followed(retries.of_script(job, reason, numbers.next(), now_s))
    job = replace(job, refused_count=1)
    again = retries.from_outside(job, f"could not begin: {reason}", numbers.next(), now_s)
    return Followed(again, (Strike(part.node, reason),))


def _started_again(
    job: Job,
    ended: list[tuple[Part, LaunchState]],
    cluster: Cluster,
    numbers: Numbers,
    now_s: float,
) -> Job:
    """Return the job whose launchers on some nodes are started once more, or left out."""
    leaving = {part.node for part, _ in ended if cluster.nodes[part.node].leaving}
    if leaving:
        return without(job, leaving, "will be taken away", numbers, now_s)
    reason = _said(*ended[0])
    number = numbers.next()
    struck = retries.struck(job, now_s)
    if retries.worn_out(struck):
        return retries.from_outside(job, reason, number, now_s)
    again = {part.node for part, _ in ended}
    parts = tuple(replace(p, start=number) if p.node in again else p for p in job.parts)
    return moved(granted(struck, parts, number, now_s), State.RESCALING, now_s, reason)


# ------------------------------------------------------------------------------ nodes that are lost


def _losses(job: Job, cluster: Cluster, numbers: Numbers, now_s: float) -> Followed:
    nodes = cluster.nodes
    lost = {p.node for p in job.parts if p.node not in nodes or nodes[p.node].gone}
    return Followed(without(job, lost, "lost", numbers, now_s) if lost else job)


def without(job: Job, nodes: set[str], what: str, numbers: Numbers, now_s: float) -> Job:
    """Return the job without nodes: on the others, if they are enough, else queued."""
    rest = tuple(part for part in job.parts if part.node not in nodes)
    named = ", ".join(sorted(nodes))
    text = f"node {named}: {what}"
    number = numbers.next()
    if not job.spec.runs_on(sum(len(part.devices) for part in rest)):
        return moved(released(job, number, now_s), State.QUEUED, now_s, text)
    state = State.STARTING if job.state is State.STARTING else State.RESCALING
    return moved(granted(job, rest, number, now_s), state, now_s, text)


# ---------------------------------------------------------------------- what never becomes a round


def _overdue(job: Job, cluster: Cluster, numbers: Numbers, now_s: float) -> Followed:
    """Give up nodes whose launcher does not come; only while somebody would say if it did."""
    waits = job.state in (State.STARTING, State.RESCALING)
    since_s = max(job.since_s, cluster.rounds_since_s)
    if cluster.rounds is None or not waits or now_s - since_s < START_S_MAX:
        return Followed(job)
    missing = {p.node for p in job.parts if not _runs(job, p, cluster)}
    waiting = _round(job, cluster).waiting
    text = f"did not begin within {START_S_MAX:.0f} s" + (f": {waiting}" if waiting else "")
    strikes = tuple(Strike(node, f"no launcher of {job.name} came") for node in sorted(missing))
    if job.state is State.STARTING:
        return Followed(retries.from_outside(job, text, numbers.next(), now_s), strikes)
    if not missing:
        return Followed(job)  # it trains on what it had, and waits for a step to be saved
    return Followed(without(job, missing, text, numbers, now_s), strikes)


def _runs(job: Job, part: Part, cluster: Cluster) -> bool:
    node = cluster.nodes.get(part.node)
    state = node.state(job.name, part.start) if node else None
    return state is not None and state.outcome is Outcome.RUNNING
