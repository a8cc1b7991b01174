"""From what a plan wishes to what jobs have: all of it or nothing, and no GPU twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_services.scheduler.domain.cluster import Cluster
from holdfast_services.scheduler.domain.job import Job, Part, State, granted, moved, released
from holdfast_services.scheduler.domain.numbers import Numbers

Wish = Mapping[str, int]
"""GPUs by node; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Jobs that have changed, and of those that wait why, and for whom."""

    jobs: Mapping[str, Job]
    waits: Mapping[str, str] = field(default_factory=dict)


def grant(
    jobs: Sequence[Job],
    wishes: Mapping[str, Wish],
    cluster: Cluster,
    numbers: Numbers,
    now_s: float,
) -> Granted:
    """Give jobs what is wished, as far as it is free.

    Args:
        jobs: All that have or had GPUs or may get some, in the order of the queue.
        wishes: By job; one that is not in it keeps what it has.
        cluster: The nodes.
        numbers: Where grants have their numbers from.
        now_s: Now.
    """
    book = _Book(jobs, cluster, now_s)
    wanting = [job for job in jobs if _wants(job, wishes, cluster, now_s)]
    for job in wanting:  # what is given up first: others wait for it
        if _is_less(wishes[job.name], job):
            book.put(_given(job, book.parts(job, wishes[job.name]), numbers, now_s))
    waits: dict[str, str] = {}
    blocked: dict[str, set[str]] = {}
    for job in wanting:
        if _is_less(wishes[job.name], job):
            continue
        why, by = book.missing(job, wishes[job.name])
        if why:
            waits[job.name], blocked[job.name] = why, by
        else:
            book.put(_given(job, book.parts(job, wishes[job.name]), numbers, now_s))
    for name in _who_give_way([job.name for job in jobs], blocked):
        book.put(_gives_way(book.jobs[name], wishes[name], numbers, now_s))
    before = {job.name: job for job in jobs}
    changed = {name: job for name, job in book.jobs.items() if job is not before[name]}
    return Granted(jobs=changed, waits=waits)


def _wants(job: Job, wishes: Mapping[str, Wish], cluster: Cluster, now_s: float) -> bool:
    """Tell whether a plan may change what a job has; a plan is older than the newest news."""
    wish = wishes.get(job.name)
    if wish is None or job.over or dict(wish) == job.shares:
        return False
    if not job.parts and now_s < job.not_before_s:
        return False
    if job.parts and not job.spec.preemptible and job.state is not State.STARTING:
        return False
    total = sum(wish.values())
    known = all(node in cluster.nodes and count > 0 for node, count in wish.items())
    return total == 0 or (known and job.spec.runs_on(total))


def _is_less(wish: Wish, job: Job) -> bool:
    has = job.shares
    return all(count <= has.get(node, 0) for node, count in wish.items())


class _Book:
    """Who has which GPU while grants are made."""

    def __init__(self, jobs: Iterable[Job], cluster: Cluster, now_s: float) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._cluster = cluster
        self._hindrances = {
            name: node.hindrance(now_s) or _stranger(name, self.jobs, cluster)
            for name, node in cluster.nodes.items()
        }
        self._taken: dict[str, dict[int, str]] = {}
        self._kept: dict[str, set[str]] = {}
        for job in self.jobs.values():
            self._note(job)

    def put(self, job: Job) -> None:
        """Note what a job has now; what it gave up stays its own until that is known to be free."""
        self.jobs[job.name] = job
        self._note(job)

    def _note(self, job: Job) -> None:
        for part in (*job.parts, *job.held):
            taken = self._taken.setdefault(part.node, {})
            taken.update(dict.fromkeys(part.devices, job.name))
        for part in job.parts:
            self._kept.setdefault(part.node, set()).add(job.name)

    def _free(self, node: str) -> list[int]:
        taken = self._taken.get(node, {})
        return [d for d in range(self._cluster.nodes[node].gpus) if d not in taken]

    def missing(self, job: Job, wish: Wish) -> tuple[str, set[str]]:
        """Return why a job cannot have its wish now, and whose GPUs it waits for; empty: it can."""
        reasons, by = [], set()
        for node, count in wish.items():
            more = count - job.shares.get(node, 0)
            if more <= 0:
                continue
            lacking = more - len(self._free(node))
            if hindrance := self._hindrances[node]:
                reasons.append(f"node {node}: {hindrance}")
            elif lacking > 0:
                others = {who for who in self._taken.get(node, {}).values() if who != job.name}
                by |= others & self._kept.get(node, set())  # what is held will be free by itself
                whose = f" of {', '.join(sorted(others))}" if others else ""
                reasons.append(f"waits for {lacking} more GPUs of node {node}{whose}")
        return "; ".join(reasons), by

    def parts(self, job: Job, wish: Wish) -> list[Part]:
        """Return the parts that a wish comes to; a new one has start 0."""
        made = []
        for node, count in wish.items():
            old = job.part(node)
            own = old.devices[:count] if old else ()
            devices = (*own, *self._free(node)[: count - len(own)])
            start = old.start if old else 0
            made.append(Part(node=node, devices=tuple(sorted(devices)), start=start))
        return made


def _stranger(name: str, jobs: Mapping[str, Job], cluster: Cluster) -> str:
    """Return what runs on a node that no job knows of: nobody knows on which GPUs."""
    for state in cluster.nodes[name].launches:
        job = jobs.get(state.job)
        known = {(p.node, p.start) for p in (*job.parts, *job.held)} if job else set()
        if state.outcome.value == "running" and (name, state.start) not in known:
            return f"a launcher of {state.job} that was given up still runs there"
    return ""


def _given(job: Job, parts: Sequence[Part], numbers: Numbers, now_s: float) -> Job:
    number = numbers.next()
    if not parts:
        text = "its GPUs go to other jobs"
        return moved(released(job, number, now_s), State.QUEUED, now_s, text)
    started = tuple(
        Part(node=part.node, devices=part.devices, start=part.start or number) for part in parts
    )
    state = State.STARTING if not job.parts or job.state is State.STARTING else State.RESCALING
    gpus = sum(len(part.devices) for part in parts)
    where = ", ".join(part.node for part in parts)
    return moved(granted(job, started, number, now_s), state, now_s, f"{gpus} GPUs on {where}")


def _who_give_way(order: Sequence[str], blocked: Mapping[str, set[str]]) -> Iterable[str]:
    """Return who gives up its GPUs so that jobs do not wait for each other for ever.

    Of each circle the last in the queue.
    """
    found = set()
    for name in blocked:
        circle = _circle(name, blocked)
        if circle:
            found.add(max(circle, key=order.index))
    return sorted(found)


def _circle(name: str, blocked: Mapping[str, set[str]]) -> set[str]:
    """Return all jobs that wait for ``name`` while it waits for them; empty: there are none."""
    forward = _reached(name, blocked)
    return {other for other in forward if name in _reached(other, blocked)}


def _reached(name: str, blocked: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [name]
    while left:
        for other in blocked.get(left.pop(), ()):
            if other in blocked and other not in seen:
                seen.add(other)
                left.append(other)
    return seen


def _gives_way(job: Job, wish: Wish, numbers: Numbers, now_s: float) -> Job:
    """Return the job with what it has and is to keep; with nothing, where that is too little."""
    kept = []
    for node, count in wish.items():
        if old := job.part(node):
            kept.append(Part(node=node, devices=old.devices[:count], start=old.start))
    enough = job.spec.runs_on(sum(len(part.devices) for part in kept))
    if not job.parts or (enough and {p.node: len(p.devices) for p in kept} == job.shares):
        return job
    return _given(job, kept if enough else (), numbers, now_s)
