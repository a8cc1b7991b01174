"""The use cases of agents, each one transaction: read, let the domain decide, write.

Synchronous: ``transactor`` runs them in its threads and redoes one that lost a race. Locks are
taken in one order, the pulse, jobs by name, nodes by name, so that no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.attempts import Seat
from holdfast.core.ids import CheckpointId, Generation, RunId, Step, node_name
from holdfast.core.inventory import Inventory
from holdfast.core.reports import RankCosts
from holdfast.core.shard import Shard
from holdfast.core.user_events import EVENTS_PER_CALL_MAX, Event
from holdfast.errors import (
    AlreadyExistsError,
    CheckpointError,
    InvalidRequestError,
    UnavailableError,
)
from holdfast_services.metadata.domain import attempts
from holdfast_services.metadata.domain.advance_run import advance
from holdfast_services.metadata.domain.early_copies import has_last_step
from holdfast_services.metadata.domain.model import Limits, Node, Run
from holdfast_services.metadata.domain.node_view import World, world
from holdfast_services.metadata.domain.readmitted_attempt import seat
from holdfast_services.metadata.storage import Catalogue

PULSE_S = 1.0
PULSE_GAP_S_MAX = 2.0
"""Less than what is left of a lease of 3 s when a launcher has renewed it a quarter of it ago; more
than ``PULSE_S`` and a tick."""
CLOCK_BACK_S_MIN = 1.0
SILENT_S_MAX = 5.0
"""More than ``PULSE_S`` and a tick on a busy machine: past it the database takes no writes."""
IDLE_S_MAX = 60.0
EVENT_TEXT_LENGTH_MAX = 2000
LISTEN_S = 3.0
"""More than agents rest after a report that failed, by ``REPORT_WAITS`` of their reporter."""


@dataclass(frozen=True, slots=True)
class SeatWish:
    """A registration, with what was seen just before: the catalogue may have been lost since.

    ``run`` is the job's, should the job be new. ``begun``: the attempt was there. ``newest``: so
    was this checkpoint.
    """

    registration: attempts.Registration
    run: str
    begun: bool = False
    newest: CheckpointId | None = None


def pulse(catalogue: Catalogue, now_s: float, limits: Limits) -> float:
    """Record that leases can be renewed; after a gap, renew all of them.

    A node that could not renew because the catalogue was away has not been lost by it (P5). Nor
    does one that is lost live on because the database's clock was ahead and was set right: then
    all times that rules wait for come back to now.

    Returns:
        Until when nobody decides: agents that do not know of this catalogue yet may have more. Of
        a gap that is shorter than a node's lease all are known.
    """
    before_s, since_s = catalogue.pulse()
    if before_s > now_s:
        # Somebody may have beaten while this transaction waited: what counts is the clock after.
        now_s = catalogue.now_s()
        if before_s - now_s > CLOCK_BACK_S_MIN and catalogue.beat(before_s, now_s):
            catalogue.bring_back(now_s, limits.node_lease_s)
        return min(since_s, now_s) + limits.listen_s
    gap = now_s - before_s > PULSE_GAP_S_MAX
    if now_s - before_s > max(PULSE_GAP_S_MAX, limits.node_lease_s):
        since_s = now_s
    if now_s - before_s >= PULSE_S and catalogue.beat(before_s, now_s, since_s) and gap:
        catalogue.extend_node_leases(before_s, now_s + limits.node_lease_s)
        catalogue.extend_attempt_leases(before_s, now_s + limits.node_lease_s)
        catalogue.extend_launcher_leases(before_s, now_s + limits.node_lease_s)
    return since_s + limits.listen_s


def check_written(catalogue: Catalogue) -> None:
    """Refuse if the database has not been written for too long; a plain read.

    Raises:
        UnavailableError: says for how long.
    """
    silent_s = catalogue.now_s() - catalogue.pulse_s()
    if silent_s > SILENT_S_MAX:
        known = f"for {silent_s:.0f} s" if catalogue.pulse_s() else "yet"
        raise UnavailableError(f"the catalogue's database could not be written {known}")


def register(
    catalogue: Catalogue, wishes: Sequence[SeatWish], limits: Limits
) -> list[Seat | CheckpointError]:
    """Return a seat or the refusal for each wish."""
    now_s = catalogue.now_s()
    listens_until_s = pulse(catalogue, now_s, limits)
    answers: dict[int, Seat | CheckpointError] = {}
    for job in sorted({wish.registration.spec.job for wish in wishes}):
        mine = [(i, wish) for i, wish in enumerate(wishes) if wish.registration.spec.job == job]
        catalogue.lock_job(job)
        lost = {i: _lost(job) for i, wish in mine if not _is_there(catalogue, wish)}
        answers |= lost
        mine = [(i, wish) for i, wish in mine if i not in lost]
        if not mine:
            continue
        nodes = catalogue.nodes()
        before = informed(catalogue, _locked(catalogue, job, mine[0][1].run, now_s), nodes)
        run, events = before, list[Event]()
        for index, wish in ((i, item.registration) for i, item in mine):
            known = catalogue.generation_of(job, wish.spec.nonce)
            try:
                outcome = seat(run, wish, known, now_s, limits)
            except CheckpointError as refusal:
                answers[index] = refusal
                events += _refused(wish, refusal)
                continue
            run = outcome.run
            events += outcome.events
            answers[index] = Seat(run=run.id, generation=run.generation, record=run.record)
            if known is None:
                # Before the next wish: one attempt may replace another within a batch, and the
                # nonces of both must have a row, or the older one's repeat begins a third (M1).
                catalogue.save_run(before, run)
                before = run
        if run.attempt and len(run.ranks) == run.attempt.spec.world_size:
            outcome = advance(run, nodes, now_s, limits, listens_until_s)
            run, events = outcome.run, [*events, *outcome.events]
        catalogue.save_run(before, run)
        catalogue.add_events(events, "", now_s)
    return [answers[index] for index in range(len(wishes))]


def _is_there(catalogue: Catalogue, wish: SeatWish) -> bool:
    """Tell whether this is the catalogue that the wish was made for: it has what was seen."""
    mine = wish.registration.spec
    begun = catalogue.generation_of(mine.job, mine.nonce) is not None
    if begun or wish.begun:
        return begun
    return wish.newest is None or catalogue.checkpoint(wish.newest) is not None


def _lost(job: str) -> UnavailableError:
    text = f"the catalogue has just lost its checkpoints of {job}: try again"
    return UnavailableError(text, job=job)


def _refused(wish: attempts.Registration, refusal: CheckpointError) -> list[Event]:
    if not isinstance(refusal, AlreadyExistsError):
        return []
    context = {"rank": str(wish.spec.rank), "node": wish.node, **refusal.context}
    return [
        Event(
            kind="attempt_refused",
            severity="warning",
            message=f"{wish.spec.holder or wish.node} was refused: {refusal.message}",
            job=wish.spec.job,
            context=context,
        )
    ]


def report(
    catalogue: Catalogue, inventories: Sequence[Inventory], limits: Limits
) -> tuple[list[int], frozenset[str] | None]:
    """Store inventories and all that follows from them.

    Returns:
        0 for each, or the incarnation it must exceed; and if somebody has to be told, the runs
        that may have changed, else None.
    """
    now_s = catalogue.now_s()
    listens_until_s = pulse(catalogue, now_s, limits)
    before = catalogue.nodes()
    # Each word of a node counts for a restore that is being decided, also that there is no news.
    touched = {**catalogue.deciding_jobs(now_s - IDLE_S_MAX), **jobs_of(inventories, before, now_s)}
    runs = [_locked(catalogue, job, touched[job], now_s) for job in sorted(touched)]
    answers: dict[str, int] = {}
    for item in sorted(inventories, key=lambda i: (i.node.node, i.incarnation, i.sequence)):
        answers[_key(item)] = _take(catalogue, item, now_s, limits)
    nodes = catalogue.nodes()
    changed = any(_is_news(item, before.get(item.node.node), now_s) for item in inventories)
    for run in (informed(catalogue, run, nodes) for run in runs):
        outcome = advance(run, nodes, now_s, limits, listens_until_s)
        catalogue.save_run(run, outcome.run)
        catalogue.add_events(outcome.events, "", now_s)
        changed = changed or _differ(run, outcome.run)
    told = frozenset(run.id for run in runs) if changed else None
    return [answers[_key(item)] for item in inventories], told


def _is_news(item: Inventory, before: Node | None, now_s: float) -> bool:
    """Tell whether an inventory says more than that its node lives and its ranks have gone on."""
    return before is None or not before.live(now_s) or item.lasting() != before.inventory.lasting()


def _key(item: Inventory) -> str:
    return f"{item.node.node} {item.incarnation} {item.sequence}"


def jobs_of(
    inventories: Iterable[Inventory], before: Mapping[str, Node], now_s: float
) -> dict[str, str]:
    """Return job -> run for all whose facts the inventories may change.

    That is whatever one of them says of a run, or the one it replaces said, that the other does
    not, and the jobs that train: their ranks go on, and so do their leases. All that both speak of
    where the node is new, or another, or says something of itself. Else each heartbeat of a node,
    and each step of a job, would read again all that jobs which have ended left there.
    """
    found: dict[str, str] = {}
    for item in inventories:
        old = before.get(item.node.node)
        runs = _runs_in_the_news(item, old, now_s)
        for inventory in (item, old.inventory) if old else (item,):
            for status in inventory.ranks:
                if status.run in runs or (status.live and inventory is item):
                    found.setdefault(status.job, status.run)
            for shard in shards_of(inventory):
                if shard.id.run in runs:
                    found.setdefault(shard.job, shard.id.run)
    return found


def _runs_in_the_news(item: Inventory, before: Node | None, now_s: float) -> Collection[str]:
    """Return the runs of which an inventory says something else than the one before."""
    now, then = item.by_run(), before.inventory.by_run() if before else {}
    runs = now.keys() | then.keys()
    if before is None or not before.live(now_s):
        return runs
    if item.of_itself() != before.inventory.of_itself():
        return runs
    return {run for run in runs if now.get(run) != then.get(run)}


def shards_of(inventory: Inventory) -> Iterable[Shard]:
    """Yield what a node has a segment of, and of each of its elements the first member."""
    yield from (held.shard for held in inventory.shards)
    yield from (held.element.stripe.members[0] for held in inventory.elements)


def _take(catalogue: Catalogue, item: Inventory, now_s: float, limits: Limits) -> int:
    name = item.node.node
    known = catalogue.node_key(name)
    if known and item.incarnation < known[0]:
        return known[0] + 1
    until_s = 0.0 if item.leaving else now_s + limits.node_lease_s
    taken = catalogue.put_inventory(item, now_s, until_s)
    if taken and not item.leaving and (known is None or known[2] <= now_s):
        event = Event(kind="node_joined", severity="info", message=f"node {name} joined")
        catalogue.add_events([event], name, now_s)
    return 0


def _locked(catalogue: Catalogue, job: str, new_run: str, now_s: float) -> Run:
    """Return the job's run, its row locked; an unknown job begins with ``new_run``.

    Raises:
        InvalidRequestError: ``new_run`` is another job's.
    """
    run = catalogue.lock_job(job)
    if run is None:
        catalogue.add_job(job, new_run, now_s)
        run = catalogue.lock_job(job)
    loaded = catalogue.load_run(run) if run else None
    if loaded is None:
        raise InvalidRequestError(f"run {new_run} is not one of job {job}", job=job, run=new_run)
    return loaded


def informed(catalogue: Catalogue, run: Run, nodes: Mapping[str, Node]) -> Run:
    """Return the run with the rows of all that ``nodes`` hold or gave up of it (M5).

    ``advance`` takes what has no row for new: a copy that was away for long may be of a
    checkpoint that is durable long since, and is not among the rows that a run is read with.
    """
    spoken = {
        shard.id.checkpoint
        for node in nodes.values()
        for shard in shards_of(node.inventory)
        if shard.id.run == run.id
    }
    told = {
        CheckpointId(RunId(step.run), Step(step.step), Generation(step.generation))
        for node in nodes.values()
        for step in node.inventory.abandoned
        if step.run == run.id
    }
    return catalogue.with_rows(run, spoken | told)


def record(catalogue: Catalogue, node: str, events: Sequence[Event]) -> None:
    """Append a node's events.

    Raises:
        InvalidRequestError: no name of a node, or more than ``EVENTS_PER_CALL_MAX`` events.
    """
    node_name(node)
    if len(events) > EVENTS_PER_CALL_MAX:
        raise InvalidRequestError(f"{len(events)} events, at most {EVENTS_PER_CALL_MAX}")
    short = [replace(e, message=e.message[:EVENT_TEXT_LENGTH_MAX]) for e in events]
    catalogue.add_events(short, node, catalogue.now_s())


def tick(catalogue: Catalogue, limits: Limits) -> int:
    """Do what only time brings: leases that ran out, decisions that waited long enough.

    Returns:
        The number of things that changed; 0: nobody has to be told.
    """
    now_s = catalogue.now_s()
    listens_until_s = pulse(catalogue, now_s, limits)
    changed = 0
    jobs = catalogue.active_jobs(now_s - IDLE_S_MAX)
    runs = [_locked(catalogue, job, "", now_s) for job in jobs]
    lost = catalogue.mark_lost(now_s)
    for name in lost:
        text = f"node {name} is lost: its agent has stopped reporting"
        event = Event(kind="node_lost", severity="warning", message=text)
        catalogue.add_events([event], name, now_s)
    nodes = catalogue.nodes() if runs else {}
    for run in (informed(catalogue, run, nodes) for run in runs):
        outcome = advance(run, nodes, now_s, limits, listens_until_s)
        catalogue.save_run(run, outcome.run)
        catalogue.add_events(outcome.events, "", now_s)
        changed += _differ(run, outcome.run)
    catalogue.forget_nodes(now_s)
    catalogue.forget_events()
    return changed + len(lost)


def _differ(before: Run, after: Run) -> bool:
    """Tell whether more than a lease has changed, or what ranks have cost."""
    return before != after and _but_lease(before) != _but_lease(after)


def _but_lease(run: Run) -> Run:
    bare = RankCosts()
    attempt = run.attempt and replace(run.attempt, lease_until_s=0.0, costs=bare, costs_at_s=0.0)
    return replace(run, attempt=attempt)


def begun(catalogue: Catalogue, job: str, nonce: bytes) -> bool:
    """Tell whether the attempt is under way."""
    return catalogue.generation_of(job, nonce) is not None


def known(catalogue: Catalogue, job: str) -> CheckpointId | None:
    """Return the job's newest checkpoint here, in any state; None: it has none."""
    run = catalogue.run_of(job)
    return catalogue.newest_key(run) if run else None


def note_unasked(catalogue: Catalogue, job: str, reason: str) -> None:
    """Record that a job continues without asking the object store."""
    text = f"{job} continues from the catalogue's checkpoints, without the object store: {reason}"
    event = Event(kind="object_store_not_asked", severity="warning", message=text, job=job)
    catalogue.add_events([event], "", catalogue.now_s())


def snapshot(
    catalogue: Catalogue, limits: Limits, ended: MutableMapping[str, Run] | None = None
) -> World:
    """Return all nodes and the runs that nodes or attempts have to do with, in one snapshot.

    ``ended`` are runs that were read before, of which nobody has written since, by id: of those
    whose jobs have ended; what else is read of such ones is added.
    """
    ended = {} if ended is None else ended
    now_s = catalogue.now_s()
    nodes = catalogue.nodes()
    names: set[str] = {
        shard.id.run for node in nodes.values() for shard in shards_of(node.inventory)
    }
    jobs = catalogue.active_jobs(now_s - IDLE_S_MAX)
    active = {run for run in map(catalogue.run_of, jobs) if run}
    loaded: list[Run | None] = []
    for name in sorted(names | active):
        known = None if name in active else ended.get(name)
        run = known or catalogue.load_run(name)
        loaded.append(run)
        if name in active or run is None:
            ended.pop(name, None)
        else:
            ended[name] = run
    runs = tuple(run for run in loaded if run)
    if not limits.object_tier:
        runs = tuple(replace(run, stored=()) for run in runs)
    ending = any(has_last_step(run, now_s) for run in runs)
    launches = catalogue.launches() if ending else ()
    return world(nodes, runs, now_s, limits, launches)
