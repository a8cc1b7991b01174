"""Whether a job's slots fit into the arena's budget beside what is here already (P8). Pure."""

from __future__ import annotations

from holdfast.core.budget import (
    SLOTS_PER_RANK_MAX,
    MemoryNeed,
    Reservation,
    memory_need,
    shortfall,
)
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import ExhaustedError, InvalidRequestError
from holdfast_services.agent.domain import elements
from holdfast_services.agent.domain.slot_rules import freeable
from holdfast_services.agent.domain.state import Session, Slot, State

JOBS_NAMED_MAX = 4


def admit(state: State, session: Session, asked: Reservation) -> None:
    """Refuse a reservation that the budget cannot carry (P8).

    The need of every job with live sessions here counts, and what other jobs have left and may not
    be freed; local ranks that have not reserved yet are taken to be like this one, so that the
    first rank is refused and not the last.

    Raises:
        ExhaustedError: with the sum written out.
        InvalidRequestError: a length or a number of slots that makes no sense.
    """
    if asked.length_bytes <= 0 or not 0 < asked.slots <= SLOTS_PER_RANK_MAX:
        raise InvalidRequestError(
            f"cannot reserve {asked.slots} slots of {asked.length_bytes} bytes; "
            f"1..{SLOTS_PER_RANK_MAX} slots of at least 1 byte"
        )
    if refused := refusal(state, session.spec.job, _need(state, session, asked)):
        raise ExhaustedError(refused, node=state.me.node, job=session.spec.job)


def refusal(state: State, job: str, need: MemoryNeed) -> str:
    """Return why ``job`` does not fit beside what is here, the sum written out; empty: it does."""
    training, left = _trained_bytes(state, job), _left_bytes(state, job)
    if need.total_bytes + training + sum(left.values()) <= state.budget_bytes:
        return ""
    advice = "remove a finished job's memory (holdfast rm JOB), " if left else ""
    return shortfall(need, state.budget_bytes, beside=_beside(training, left), advice=advice)


def refusal_of_files(state: State, job: str, need: MemoryNeed, free_bytes: int) -> str:
    """Return why the file system has no room for what the budget allows; empty: it has.

    Others may fill it, too: a budget is a limit, not memory that is kept for us.

    Args:
        state: Of this node; all its slots are room that is had already.
        job: The job that is about to begin.
        need: What it needs here.
        free_bytes: What is free in the file system of the arena.
    """
    training, left = _trained_bytes(state, job), _left_bytes(state, job)
    if need.total_bytes + training + sum(left.values()) <= state.used_bytes + free_bytes:
        return ""
    beside = f", beside {_beside(training, left)}" if training or left else ""
    return (
        f"{need}{beside}, but the arena's file system has only {format_bytes(free_bytes)} free "
        f"beside {format_bytes(state.used_bytes)} of slots, though its budget is "
        f"{format_bytes(state.budget_bytes)}: remove what else fills it, enlarge it (docker: "
        f"--shm-size, compose: shm_size), or lower replicas"
    )


def _beside(training: int, left: dict[str, int]) -> str:
    """Name what else takes room here: most first; empty if nothing does."""
    beside = [f"{format_bytes(training)} of other runs"] if training else []
    most = sorted(left, key=lambda name: (-left[name], name))
    named = ", ".join(f"{name}: {format_bytes(left[name])}" for name in most[:JOBS_NAMED_MAX])
    more = len(most) - JOBS_NAMED_MAX
    if named:
        rest = f" and {more} more jobs" if more > 0 else ""
        beside.append(f"checkpoints of jobs that do not train here ({named}{rest})")
    return " and ".join(beside)


def _need(state: State, session: Session, asked: Reservation) -> MemoryNeed:
    mates = [s for s in _mates(state, session) if s.id != session.id and s.reservation]
    reserved = sum(s.reservation.length_bytes for s in mates if s.reservation)
    missing = max(session.spec.local_world_size - len(mates), 1)
    nodes = -(-session.spec.world_size // max(session.spec.local_world_size, 1))
    own = reserved + asked.length_bytes * missing
    return memory_need(
        own_bytes=own,
        restored_bytes=max(asked.restored_bytes, own),
        protection=session.spec.protection,
        nodes_count=max(nodes, nodes_known(state)),
        slots=asked.slots,
        persist=session.spec.persist.on,
        shards_count=len(mates) + missing,
    )


def reserved_bytes(state: State) -> int:
    """Return what the ranks that train here have reserved."""
    return sum(
        session.reservation.slots * session.reservation.length_bytes
        for session in state.sessions.values()
        if session.active and session.reservation
    )


def unmade_bytes(state: State) -> int:
    """Return what all that trains or is kept here needs beside the slots that there are."""
    needed = _trained_bytes(state, "") + sum(_left_bytes(state, "").values())
    return max(needed - state.used_bytes, 0)


def nodes_known(state: State) -> int:
    """Return how many nodes are live: any of them may get copies, whatever the job's own are."""
    return len(state.view.nodes) if state.view else 0


def _trained_bytes(state: State, job: str) -> int:
    """Return what the other jobs that train here need."""
    seen = {job: 0}
    for other in state.sessions.values():
        if other.active and other.reservation and other.spec.job not in seen:
            seen[other.spec.job] = _need(state, other, other.reservation).total_bytes
    return sum(seen.values())


def _left_bytes(state: State, job: str) -> dict[str, int]:
    """Return job -> bytes that may not be freed, of the jobs that do not train here."""
    training = {s.spec.job for s in state.sessions.values() if s.active and s.reservation}
    found: dict[str, int] = {}
    for slot in state.slots.values():
        name = _kept_of(state, slot)
        if name is None:
            continue
        if name != job and name not in training:
            found[name] = found.get(name, 0) + slot.length_bytes
    return found


def _kept_of(state: State, slot: Slot) -> str | None:
    """Return the job of what a slot holds; None: nothing, or what may be freed."""
    if slot.element is not None:
        job = slot.element.element.stripe.members[0].job
        return None if elements.freeable(state, slot) else job
    if slot.content is None or freeable(state, slot):
        return None
    return slot.content.shard.job


def _mates(state: State, session: Session) -> list[Session]:
    return [
        other
        for other in state.sessions.values()
        if other.active and (other.run, other.generation) == (session.run, session.generation)
    ]
