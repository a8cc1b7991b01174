"""A job as the scheduler knows it: its state, what it has, what is not yet known to be free.

Changes make a new value. Times are those of the database's clock; numbers come from the one counter
that plans, grants and starts share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from holdfast.core.job_spec import JobSpec
from holdfast.core.text import tellable

HISTORY_COUNT_MAX = 20


class State(Enum):
    """Where a job is in its life."""

    QUEUED = "queued"  # has no GPUs
    STARTING = "starting"  # has GPUs; its round has not begun
    RUNNING = "running"
    RESCALING = "rescaling"  # trains on what it had until the round of its new grant begins
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


OVER = frozenset({State.ENDED, State.FAILED, State.CANCELLED})
_TRANSITIONS = {
    State.QUEUED: {State.STARTING, *OVER},
    State.STARTING: {State.QUEUED, State.RUNNING, *OVER},
    State.RUNNING: {State.QUEUED, State.RESCALING, *OVER},
    State.RESCALING: {State.QUEUED, State.RUNNING, *OVER},
    **{state: frozenset() for state in OVER},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """GPUs of one node by their numbers, and the start of the launcher that has them."""

    node: str
    devices: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Part):
    """GPUs that a job has given up at ``number``, until it is known that nothing of it is there."""

    number: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What a job became, when and why."""

    at_s: float
    state: State
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job.

    ``id``: of this submission. ``parts``: what it has, granted under ``number``; with no parts that
    is the number under which it gave up the last. ``told``: the newest number that the metadata
    service has taken. ``ran``: the newest of which a round ran; ``starts``: so many. ``cancel``:
    why it is to end, empty: it is not. ``waiting``: for what its wish waits. ``not_before_s``: no
    start before. ``script_failures``, ``outside_at_s`` and ``refused_count``, of starts in a row
    that could not begin, are what its retries are counted by. ``gpus_since_s``: since when it has
    had GPUs without a gap, or has waited without one; ``waited_s``: how long it had waited when it
    got those that it has. ``gpu_s``: GPU seconds that it has had until ``counted_s``.
    """

    spec: JobSpec
    id: str
    submitted_at_s: float
    state: State = State.QUEUED
    since_s: float = 0.0
    message: str = ""
    cancel: str = ""
    waiting: str = ""
    parts: tuple[Part, ...] = ()
    held: tuple[Held, ...] = ()
    number: int = 0
    told: int = 0
    ran: int = 0
    not_before_s: float = 0.0
    script_failures: int = 0
    refused_count: int = 0
    outside_at_s: tuple[float, ...] = ()
    began_at_s: float = 0.0
    starts: int = 0
    gpus_since_s: float = 0.0
    waited_s: float = 0.0
    gpu_s: float = 0.0
    counted_s: float = 0.0
    history: tuple[Transition, ...] = ()

    @property
    def name(self) -> str:
        """Under which it was submitted, launched and saved."""
        return self.spec.name

    @property
    def over(self) -> bool:
        """Whether it will never train again under this submission."""
        return self.state in OVER

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be done about it."""
        return self.over and not self.held and not self.parts and self.told >= self.number

    @property
    def shares(self) -> dict[str, int]:
        """How many GPUs of which nodes it has."""
        return {part.node: len(part.devices) for part in self.parts}

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return sum(len(part.devices) for part in self.parts)

    def part(self, node: str) -> Part | None:
        """Return what it has of a node."""
        return next((part for part in self.parts if part.node == node), None)


def moved(job: Job, state: State, now_s: float, message: str = "") -> Job:
    """Return the job in another state, or with another message in the same one."""
    message = tellable(message)
    if (state, message) == (job.state, job.message):
        return job
    assert state is job.state or state in _TRANSITIONS[job.state], (job.state, state)
    entry = Transition(at_s=now_s, state=state, message=message)
    history = (*job.history, entry)[-HISTORY_COUNT_MAX:]
    since_s = job.since_s if state is job.state else now_s
    return replace(job, state=state, since_s=since_s, message=message, history=history)


def counted(job: Job, now_s: float) -> Job:
    """Return the job with the GPU seconds that it has had until now."""
    past_s = max(0.0, now_s - job.counted_s) if job.counted_s else 0.0
    return replace(job, gpu_s=job.gpu_s + past_s * job.gpus, counted_s=now_s)


def granted(job: Job, parts: tuple[Part, ...], number: int, now_s: float) -> Job:
    """Return the job with other GPUs, under a new number; what it gives up is held.

    A launcher that goes on with fewer GPUs holds the others itself.
    """
    job = counted(job, now_s)
    kept = {(part.node, part.start): set(part.devices) for part in parts}
    given_up = []
    for part in job.parts:
        rest = tuple(d for d in part.devices if d not in kept.get((part.node, part.start), ()))
        if rest:
            given_up.append(
                Held(node=part.node, devices=rest, start=part.start, number=number, since_s=now_s)
            )
    if bool(parts) != bool(job.parts):
        since_s = job.gpus_since_s or job.submitted_at_s
        job = replace(job, gpus_since_s=now_s, waited_s=now_s - since_s if parts else 0.0)
    return replace(job, parts=parts, held=(*job.held, *given_up), number=number)


def released(job: Job, number: int, now_s: float) -> Job:
    """Return the job without GPUs; the same job if it has none."""
    return granted(job, (), number, now_s) if job.parts else job
