"""Attempts: one generation per launch nonce, the lease of the name, what ranks say of themselves.

The lease tells a restart from a second trainer under the same name (architecture, section 4.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.attempts import AttemptSpec, check_generation
from holdfast.core.attempts import check as check_spec
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, node_name
from holdfast.core.inventory import RankStatus
from holdfast.core.origin import kept
from holdfast.core.user_events import Event
from holdfast.errors import AlreadyExistsError, InvalidRequestError, StaleGenerationError
from holdfast_services.metadata.domain import accounting, attempt_start, costs, failures
from holdfast_services.metadata.domain.model import (
    Attempt,
    Limits,
    Node,
    Outcome,
    RankFacts,
    Run,
)
from holdfast_services.metadata.domain.retention import check as check_retention

LEASE_PART_MIN = 0.1
"""Of a lease: less is not worth a write of the run with each report of its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The wish of one rank on ``node`` to take part in the attempt that its ``spec`` describes.

    ``generation_min`` is the newest generation of the job that the rank's agent knows of.
    """

    spec: AttemptSpec
    node: str
    generation_min: int = 0


def check(wish: Registration) -> None:
    """Refuse a registration whose numbers make no sense.

    Raises:
        InvalidRequestError: names the number.
    """
    check_spec(wish.spec)
    node_name(wish.node)
    check_generation(wish.generation_min, wish.spec.job)
    if wish.spec.retention:
        check_retention(wish.spec.retention)
    attempt_start.check(wish.spec.start, wish.spec.job)


def register(
    run: Run, wish: Registration, known: int | None, now_s: float, limits: Limits
) -> Outcome:
    """Return the run with this rank registered; the run's generation is the answer.

    Args:
        run: As read under the job's lock.
        wish: What the rank asks.
        known: Generation that the nonce already has, None for an unknown nonce.
        now_s: The database's clock.
        limits: How long a lease lasts.

    Raises:
        AlreadyExistsError: another launcher's attempt lives; names its holder.
        StaleGenerationError: a newer attempt has replaced the one the nonce names.
        InvalidRequestError: the world size, or where to begin, is not that of the attempt.
    """
    events: tuple[Event, ...] = ()
    if known is None:
        run, events = _begin(run, wish, now_s, limits)
    attempt = run.current
    # What trains keeps its number; a catalogue that was lost may have given its mates another one.
    mine = wish.spec.generation or known
    if attempt is None or (mine is not None and mine != attempt.generation):
        raise StaleGenerationError(
            f"attempt {mine} was replaced by attempt {run.generation}: stop this one",
            job=run.job,
            run=run.id,
            rank=wish.spec.rank,
        )
    asked, begun = wish.spec, attempt.spec
    if asked.world_size != begun.world_size:
        raise InvalidRequestError(
            f"rank {asked.rank} has WORLD_SIZE={asked.world_size}, but other ranks of this attempt "
            f"have {begun.world_size}: start all ranks with the same launcher",
            job=run.job,
            rank=asked.rank,
        )
    if asked.start != begun.start:
        raise InvalidRequestError(
            f"rank {asked.rank} asks to begin at {attempt_start.text_of(asked.start)}, other ranks "
            f"at {attempt_start.text_of(begun.start)}: pass the same fresh= and step= on all ranks",
            job=run.job,
            rank=asked.rank,
        )
    return Outcome(run=_seat(run, attempt, wish, now_s, limits), events=events)


def _begin(
    run: Run, wish: Registration, now_s: float, limits: Limits
) -> tuple[Run, tuple[Event, ...]]:
    previous = run.attempt
    if previous is not None and not _may_replace(previous, wish, now_s):
        raise AlreadyExistsError(
            f"another launch trains job {run.job} now: {previous.spec.holder or 'unnamed'} "
            f"(attempt "
            f"{previous.generation}, for at least {previous.lease_until_s - now_s:.1f} s more); "
            f"stop it, use another job name, or pass takeover=True to replace it",
            job=run.job,
            run=run.id,
            holder=previous.spec.holder,
            generation=previous.generation,
        )
    # A catalogue that was lost counts anew; what the agent holds was numbered by the old one.
    changed = begin(run, wish, max(run.generation, wish.generation_min) + 1, now_s, limits)
    attempt = changed.attempt
    assert attempt is not None
    return changed, (
        _registered(changed, attempt),
        *attempt_start.repeated(changed, attempt),
        *_unpersisted(changed, attempt, limits),
    )


def begin(run: Run, wish: Registration, generation: int, now_s: float, limits: Limits) -> Run:
    """Return the run with an attempt of ``generation``, no rank seated and nothing decided."""
    number = run.decision.number + 1 if run.decision else 1
    attempt = Attempt(
        generation=generation,
        spec=wish.spec,
        started_at_s=now_s,
        lease_until_s=now_s + limits.node_lease_s,
        allowed=wish.spec.protection,
        start_due=attempt_start.is_due(run, wish.spec.start),
    )
    return replace(
        run,
        generation=generation,
        attempt=attempt,
        ranks=(),
        decision=Decision(number=number, state=DecisionState.PENDING, generation=generation),
        rejected=_loaded_in_vain(run),
        pins=(),
        announcement=None,
        announced_at_s=0.0,
        retention=wish.spec.retention or run.retention,
        persisted_at_s=run.persisted_at_s or now_s,  # an interval needs a beginning
        record=failures.recorded(run),
        ledger=accounting.followed(run),
        ended=None,
    )


def _loaded_in_vain(run: Run) -> tuple[CheckpointId, ...]:
    """Return what the attempt before had confirmed and could not load, see ``restore``."""
    chosen = run.decision.checkpoint if run.decision and run.loading else None
    return (chosen,) if chosen in run.rejected else ()


def _may_replace(previous: Attempt, wish: Registration, now_s: float) -> bool:
    same_launcher = bool(wish.spec.launcher) and wish.spec.launcher == previous.spec.launcher
    return wish.spec.takeover or same_launcher or previous.lease_until_s <= now_s


def _registered(run: Run, attempt: Attempt) -> Event:
    return Event(
        kind="attempt_registered",
        severity="info",
        message=f"attempt {attempt.generation} of {run.job} began: "
        f"{attempt.spec.world_size} ranks, started by {attempt.spec.holder or 'unnamed'}",
        job=run.job,
        context={"run": run.id, "attempt": str(attempt.generation)},
    )


def _unpersisted(run: Run, attempt: Attempt, limits: Limits) -> tuple[Event, ...]:
    if not attempt.spec.persist.on or limits.object_tier:
        return ()
    text = f"{run.job} sets persist=, but HOLDFAST_STORE is not set for the metadata service"
    return (Event(kind="persist_off", severity="warning", message=text, job=run.job),)


def _seat(run: Run, attempt: Attempt, wish: Registration, now_s: float, limits: Limits) -> Run:
    """Return the run with the rank on its node; a repeat from the same node keeps what it did."""
    others = tuple(rank for rank in run.ranks if rank.rank != wish.spec.rank)
    seated = next((rank for rank in run.ranks if rank.rank == wish.spec.rank), None)
    if seated is None or seated.node != wish.node:
        seated = RankFacts(rank=wish.spec.rank, node=wish.node, registered_at_s=now_s)
    elif not seated.live:
        seated = replace(seated, live=True, registered_at_s=now_s)
    lease_until_s = max(attempt.lease_until_s, now_s + limits.node_lease_s)
    # Rank 0 says what the attempt was started with; it need not be the one that began it.
    said = wish.spec.origin and kept(wish.spec.origin)
    spec = replace(attempt.spec, origin=said or attempt.spec.origin)
    return replace(
        run,
        attempt=replace(attempt, spec=spec, lease_until_s=lease_until_s),
        ranks=tuple(sorted((*others, seated), key=lambda rank: rank.rank)),
    )


def absorb(run: Run, nodes: Mapping[str, Node], limits: Limits) -> Run:
    """Return the run with what its ranks' agents last said, and the lease that follows from it.

    A status counts from the node the rank registered on, made after it registered. Live ranks
    renew the lease, in steps of ``LEASE_PART_MIN``; it ends at once when every registered rank
    was reported gone.
    """
    attempt = run.current
    if attempt is None or not run.ranks:
        return run
    statuses = _statuses(run, attempt, nodes)
    ranks = tuple(_heard(rank, statuses.get(rank.rank)) for rank in run.ranks)
    lived = [rank for rank in ranks if rank.rank in statuses and rank.live]
    lived_s = max((nodes[rank.node].reported_at_s for rank in lived), default=0.0)
    renewed_s = lived_s + limits.node_lease_s if lived else 0.0
    lease_until_s = max(attempt.lease_until_s, renewed_s)
    rest_s = LEASE_PART_MIN * limits.node_lease_s
    if lease_until_s - attempt.lease_until_s < rest_s:
        lease_until_s = attempt.lease_until_s
    if not any(rank.live for rank in ranks):
        lease_until_s = 0.0
    heard = (nodes[rank.node].reported_at_s for rank in ranks if rank.rank in statuses)
    heard_s = max(heard, default=0.0)
    attempt = costs.kept(attempt, statuses, heard_s)
    run = replace(run, ledger=run.ledger.heard(lived_s, rest_s))
    return replace(
        run,
        ranks=ranks,
        attempt=replace(attempt, lease_until_s=lease_until_s),
        ended=failures.ended(run, ranks, statuses, heard_s),
        ledger=accounting.heard(run, attempt, ranks, heard_s),
    )


def status_by_rank(run: Run, nodes: Mapping[str, Node]) -> Mapping[int, RankStatus]:
    """Return the last status of each registered rank of the current attempt that has one."""
    attempt = run.current
    return _statuses(run, attempt, nodes) if attempt else {}


def _statuses(run: Run, attempt: Attempt, nodes: Mapping[str, Node]) -> Mapping[int, RankStatus]:
    seats = {rank.rank: rank for rank in run.ranks}
    found: dict[int, RankStatus] = {}
    for name in {rank.node for rank in run.ranks} & nodes.keys():
        node = nodes[name]
        for status in node.inventory.ranks:
            seat = seats.get(status.rank)
            mine = (status.run, status.generation) == (run.id, attempt.generation)
            mine = mine and status.nonce in (attempt.spec.nonce, b"")  # b"": an agent before nonces
            if mine and seat and seat.node == name and node.reported_at_s >= seat.registered_at_s:
                found[status.rank] = status
    return found


def _heard(rank: RankFacts, status: RankStatus | None) -> RankFacts:
    if status is None:
        return rank
    return replace(
        rank,
        live=status.live,
        ready_decision=status.ready_decision,
        loaded=rank.loaded or status.report.loaded,
    )
