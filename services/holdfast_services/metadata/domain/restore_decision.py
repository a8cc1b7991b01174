"""The restore decision: wait for evidence, propose, propose an older one, confirm, or call it lost.

``decide`` is called after every change of the facts and returns the run unchanged when there is
nothing to decide. A confirmed decision never changes again; a lost one is final for its attempt.
Source: architecture, section 4.8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core import lines
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.lines import NOTHING, Move
from holdfast.core.shard import Shard
from holdfast.core.sources import Source
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.attempt_start import made, unbound, wished
from holdfast_services.metadata.domain.awaited_reports import awaited_reports, unheard
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    ranks_of,
    shards_of,
    whole,
    with_rebuilt,
)
from holdfast_services.metadata.domain.commit_rule import acknowledged, new_row
from holdfast_services.metadata.domain.drains import rewind
from holdfast_services.metadata.domain.held_stripes import held_stripes
from holdfast_services.metadata.domain.model import (
    Attempt,
    Checkpoint,
    Limits,
    Node,
    NoParent,
    Outcome,
    Run,
)

NAMED_IN_REASON_MAX = 8


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision is taken from: inventories by node, what they prove, the time, the waits.

    Until ``listens_until_s`` nodes may have something to say that nobody has ever heard of.
    """

    nodes: Mapping[str, Node]
    evidence: Evidence
    now_s: float
    limits: Limits
    listens_until_s: float = 0.0

    def live(self) -> Collection[str]:
        """Return the names of the nodes with a lease."""
        return {name for name, node in self.nodes.items() if node.live(self.now_s)}

    def lately(self, wait_s: float) -> Collection[str]:
        """Return the names of the nodes whose last word is younger than ``wait_s``."""
        since_s = self.now_s - wait_s
        return {name for name, node in self.nodes.items() if node.reported_at_s > since_s}


def decide(run: Run, facts: Facts) -> Outcome:
    """Return the run with its restore decided as far as the facts allow, and the news of it."""
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.generation != attempt.generation:
        return Outcome(run=run)
    if run.deciding:
        return _choose_or_follow(run, attempt, decision, facts)
    if decision.state is DecisionState.LOST and any(rank.loaded for rank in run.ranks):
        # A rank was told to start over all the same (on_failure="warn"): that is a fresh start.
        return Outcome(run=moved(run, Move(attempt.generation, 0)))
    if decision.state is DecisionState.CONFIRMED:
        return _watch_loading(_known_again(run, decision, facts), decision, facts)
    return Outcome(run=run)


def _choose_or_follow(run: Run, attempt: Attempt, decision: Decision, facts: Facts) -> Outcome:
    """Go on with a restore that is not confirmed yet, unless a rank says that it has loaded.

    A catalogue that is lost by now had confirmed that: the rank brings it back itself, see
    ``readmitted_attempt``, and its mates must begin with nothing else.
    """
    if any(rank.loaded for rank in run.ranks):
        return Outcome(run=run)
    if decision.state is DecisionState.PROPOSED:
        return _follow(run, attempt, decision, facts)
    return _choose(run, attempt, decision, facts) if settled(run, facts) else Outcome(run=run)


def settled(run: Run, facts: Facts) -> bool:
    """Tell whether all evidence that can be expected is in: no later answer will be better.

    Every node with a lease, and every node that hosts a rank of the attempt, has reported since
    the attempt began; or ``decide_wait_s`` is over. Where something newer is known than what can
    be had, or nothing can be had, all ranks must have registered too: who has not may come with
    a node that nobody knows. Then one that has left is awaited as long as one that died. And no
    start is made that not all of them have asked for.

    A catalogue that has just come, or come back, decides nothing at all: of agents that have not
    reported to it yet it cannot know, and what they hold would be left behind (P6).
    """
    attempt = run.current
    listens = facts.now_s < facts.listens_until_s
    if (
        attempt is None
        or listens
        or (attempt.start_due and len(run.ranks) < attempt.spec.world_size)
    ):
        return False
    if not attempt.awaits_nodes(facts.now_s, facts.limits):
        return True
    if awaited_reports(run, facts.nodes, facts.now_s, facts.limits):
        return False
    if attempt.spec.start and attempt.start_due:
        return attempt.spec.start.fresh or bool(_candidates(run, facts.evidence.sources))
    candidates = _candidates(run, facts.evidence.live)
    if candidates and candidates[0] >= max(_seen(run, facts)):
        return True
    lately = facts.lately(facts.limits.node_lease_s)
    return len(run.ranks) == attempt.spec.world_size and not unheard(attempt, lately, facts.nodes)


def _seen(run: Run, facts: Facts) -> Collection[CheckpointId]:
    """Return what may be restored once it is whole: committed, or a shard of it was seen."""
    rows = {row.id for row in run.checkpoints if not row.expired}
    return {key for key in (*rows, *facts.evidence.known) if _restorable(run, key)}


def _candidates(
    run: Run, copies: Mapping[CheckpointId, CheckpointCopies]
) -> tuple[CheckpointId, ...]:
    """Return what may be restored, newest first: whole, not left behind, not tried in vain."""
    keys = {key for key, held in copies.items() if _restorable(run, key) and whole(held)}
    return tuple(sorted(keys - set(run.rejected), reverse=True))


def _restorable(run: Run, key: CheckpointId) -> bool:
    """Tell whether the attempt may restore ``key``: from one before it, valid, and as asked."""
    return key.generation < run.generation and run.usable(key) and wished(run, key)


def _choose(run: Run, attempt: Attempt, decision: Decision, facts: Facts) -> Outcome:
    asked = attempt.spec.start if attempt.start_due else None
    if asked and asked.fresh:
        return _start_fresh(run, attempt, decision)
    for key in _candidates(run, facts.evidence.sources):
        copies = facts.evidence.sources[key]
        if _fetchable(run, decision, copies, facts):
            return _propose(run, attempt, decision, copies)
    known = {row.id for row in run.checkpoints if _restorable(run, row.id) and not row.expired}
    known |= {k for k, c in facts.evidence.known.items() if _restorable(run, k) and whole(c)}
    hoped = any(key not in run.rejected and whole(_hoped(key, facts)) for key in known)
    if hoped or _unheard_of(run, attempt, facts):
        return Outcome(run=replace(run, decision=decision))
    if asked:
        return _refuse(run, decision, asked.step, max(known, default=None), facts)
    if known:
        return _lose(run, decision, max(known), facts)
    return _start_fresh(run, attempt, decision)


def _propose(run: Run, attempt: Attempt, decision: Decision, copies: CheckpointCopies) -> Outcome:
    shards = shards_of(copies)
    chosen = shards[0].id.checkpoint
    proposed = Decision(
        number=decision.number,
        state=DecisionState.PROPOSED,
        generation=attempt.generation,
        checkpoint=chosen,
        shards=shards,
        notes=next((row.notes for row in run.checkpoints if row.id == chosen), ""),
    )
    text = f"{run.job} is going to restore step {chosen.step} of attempt {chosen.generation}"
    changed = replace(run, decision=proposed, pins=(chosen,))
    return Outcome(run=changed, events=(_event(run, "restore_proposed", text, proposed),))


def _follow(run: Run, attempt: Attempt, decision: Decision, facts: Facts) -> Outcome:
    """Confirm what all ranks have, or turn to another step.

    To an older one when a shard has no source any more, also none that may only be restarting;
    what was accused is not tried again. To a newer one when a node has brought it after all (P5).
    """
    chosen = decision.checkpoint
    if chosen is None:
        return Outcome(run=run)
    ready = [rank for rank in run.ranks if rank.ready_decision == decision.number]
    if len(ready) == attempt.spec.world_size:
        return _confirm(run, attempt, decision, facts)
    copies = _hoped(chosen, facts)
    intact = all(_same(copies, shard.id, shard.root_digest) for shard in decision.shards)
    accused = not _fetchable(run, decision, copies, facts)
    if (
        intact
        and run.usable(chosen)
        and not accused
        and not any(
            key > chosen and _fetchable(run, decision, facts.evidence.live[key], facts)
            for key in _candidates(run, facts.evidence.live)
        )
    ):
        return Outcome(run=run)
    rejected = (*run.rejected, chosen) if accused else run.rejected
    # Should nothing else be found, the job is lost, never new: this was whole (P5).
    known = run if intact and not accused else _with_row(run, decision.shards, facts.now_s)
    given_up = replace(known, rejected=rejected, pins=(), decision=replace(decision, shards=()))
    following = replace(
        decision,
        number=decision.number + 1,
        state=DecisionState.PENDING,
        checkpoint=None,
        shards=(),
    )
    return _choose(given_up, attempt, following, facts)


def _with_row(run: Run, shards: Sequence[Shard], now_s: float) -> Run:
    """Return the run with a row of the checkpoint that ``shards`` make whole; it may have one.

    A catalogue that was lost has none of what older attempts saved.
    """
    key = shards[0].id.checkpoint
    if any(row.id == key for row in run.checkpoints):
        return run
    row = new_row(key, shards, now_s, NoParent.UNKNOWN)
    rows = sorted((*run.checkpoints, row), key=lambda item: item.id, reverse=True)
    return replace(run, checkpoints=tuple(rows))


def _hoped(key: CheckpointId, facts: Facts) -> CheckpointCopies:
    """Return the copies on live nodes and on nodes that may only be restarting.

    What a node held by its last word counts until ``decide_wait_s`` after it; with that, shards
    may follow from their stripes.
    """
    found = dict(facts.evidence.sources.get(key, {}))
    lately = facts.lately(facts.limits.decide_wait_s)
    for shard, item in facts.evidence.known.get(key, {}).items():
        there = found.get(shard) or replace(item, nodes=())
        back = [node for node in item.nodes if node in lately and node not in there.nodes]
        if back and there.shard == item.shard:
            found[shard] = replace(there, nodes=tuple(sorted((*there.nodes, *back))))
    there_again = {*facts.live(), *lately}
    nodes = [node for name, node in facts.nodes.items() if name in there_again]
    return with_rebuilt(found, held_stripes(key.run, nodes).get(key, ()))


def _unheard_of(run: Run, attempt: Attempt, facts: Facts) -> bool:
    """Tell whether a copy is of a node that this catalogue has never heard of, and may yet.

    A catalogue that came back from a moment ago does not know who has reported since: such a node
    may hold what nobody else has intact.
    """
    owners = {
        item.owner
        for key, copies in facts.evidence.known.items()
        if _restorable(run, key)
        for item in copies.values()
    }
    awaited = attempt.awaits_nodes(facts.now_s, facts.limits)
    return awaited and not owners <= {"", *facts.nodes}


def _same(copies: CheckpointCopies, key: ShardId, digest: bytes) -> bool:
    item = copies.get(key)
    return item is not None and bool(item.sources) and item.shard.root_digest == digest


def _fetchable(run: Run, decision: Decision, copies: CheckpointCopies, facts: Facts) -> bool:
    """Tell whether every node that hosts a rank holds or can still get every shard.

    Every shard in ``copies`` has a source, so only a host that accuses one can be without.
    """
    hosts = {rank.node for rank in run.ranks} & facts.nodes.keys()
    accusers = {host: bad_sources(facts.nodes[host], decision.number) for host in hosts}
    return all(
        host in copies[key].nodes or any((key, one) not in bad for one in copies[key].sources)
        for host, bad in accusers.items()
        for key in {shard for shard, _ in bad} & copies.keys()
    )


def bad_sources(node: Node, number: int) -> frozenset[tuple[ShardId, Source]]:
    """Return the sources that have served ``node`` bytes that did not match, for a decision."""
    return frozenset(
        (bad.shard, bad.source) for bad in node.inventory.bad_sources if bad.decision == number
    )


def _confirm(run: Run, attempt: Attempt, decision: Decision, facts: Facts) -> Outcome:
    """Confirm for good, leave later steps of older generations behind, keep a row of the step."""
    chosen = decision.checkpoint
    if chosen is None:
        return Outcome(run=run)
    confirmed = replace(decision, state=DecisionState.CONFIRMED)
    run = _with_row(run, decision.shards, facts.now_s)
    changed = made(replace(run, decision=confirmed), attempt)
    changed = moved(changed, lines.to(chosen, attempt.generation))
    text = f"{run.job} restores step {chosen.step} of attempt {chosen.generation}"
    news = [_event(run, "restore_confirmed", text, confirmed)]
    if behind := newly_left(run, changed):
        text = f"{len(behind)} later checkpoints of {run.job} are left behind: {named(behind)}"
        news.append(_event(run, "checkpoint_superseded", text, confirmed, "warning"))
    return Outcome(run=changed, events=tuple(news))


def _known_again(run: Run, decision: Decision, facts: Facts) -> Run:
    """Return the run with a row of what its attempt has restored: a lost catalogue had it.

    Without one it is never acknowledged, and nothing older is let go: ranks whose slots that takes
    save nothing any more. Not before nodes had time to report: few nodes allow few copies. Nor for
    a late node that has it yet, once a later step is acknowledged: it may have expired since.
    """
    chosen, kept = decision.checkpoint, acknowledged(run)
    if chosen is None or (kept and kept > chosen) or facts.now_s < facts.listens_until_s:
        return run
    copies = facts.evidence.live.get(chosen, {})
    return _with_row(run, shards_of(copies), facts.now_s) if whole(copies) else run


def _watch_loading(run: Run, decision: Decision, facts: Facts) -> Outcome:
    """Let go what all ranks have loaded; note a step that they cannot have, for the next attempt.

    A rank may find that it needs more than it had named. What nobody had named nobody has verified,
    and if no source delivers it intact its attempt ends; the next would choose the step again.
    """
    if not run.loading:
        return Outcome(run=replace(run, pins=(), rejected=()) if run.pins else run)
    chosen = decision.checkpoint
    if chosen is None or chosen in run.rejected:
        return Outcome(run=run)
    if not decision.shards:
        return Outcome(run=_confirmed_again(run, decision, chosen, facts))
    if _fetchable(run, decision, facts.evidence.sources.get(chosen, {}), facts):
        return Outcome(run=run)
    text = (
        f"{run.job} cannot load all of step {chosen.step} of attempt {chosen.generation}: a shard "
        f"that a rank needs comes intact from nowhere; the next attempt takes an older step"
    )
    failed = replace(run, rejected=(*run.rejected, chosen))
    return Outcome(run=failed, events=(_event(run, "restore_failed", text, decision, "error"),))


def _confirmed_again(run: Run, decision: Decision, chosen: CheckpointId, facts: Facts) -> Run:
    """Return the run with its restore confirmed under a new number, its shards listed and pinned.

    Ranks that train bring a restore back to a catalogue that was lost, and know its checkpoint
    alone. Without the list a rank that has not loaded yet waits for ever, and its mates for it.
    """
    copies = facts.evidence.sources.get(chosen, {})
    if facts.now_s < facts.listens_until_s or not whole(copies):
        return run
    listed = replace(decision, number=decision.number + 1, shards=shards_of(copies))
    return replace(run, decision=listed, pins=(chosen,))


def moved(run: Run, move: Move) -> Run:
    """Return the run gone on from where ``move`` says; multiples after that come due anew."""
    changed = run.after(move)
    return run if changed == run else rewind(changed, max(move.step, 0))


def newly_left(before: Run, after: Run) -> tuple[CheckpointId, ...]:
    """Return the checkpoints that could be chosen before and were left behind since, sorted."""
    usable = (row.id for row in before.checkpoints if before.usable(row.id))
    return tuple(sorted(key for key in usable if after.superseded(key)))


def named(keys: Sequence[CheckpointId]) -> str:
    """Return their steps for people, of many the first."""
    more = len(keys) - NAMED_IN_REASON_MAX
    steps = ", ".join(str(key.step) for key in keys[:NAMED_IN_REASON_MAX])
    return f"steps {steps}" + (f" and {more} more" if more > 0 else "")


def _start_fresh(run: Run, attempt: Attempt, decision: Decision) -> Outcome:
    """Confirm that there is nothing to restore, or that all there is was asked to be left."""
    fresh = replace(decision, state=DecisionState.CONFIRMED, fresh=True)
    if not attempt.start_due:
        text = f"{run.job} has no checkpoint and starts at step 0"
        changed = moved(replace(run, decision=fresh, pins=()), Move(attempt.generation, 0))
        return Outcome(run=changed, events=(_event(run, "restore_confirmed", text, fresh),))
    left = [row.id.step for row in run.checkpoints if run.usable(row.id) and not row.expired]
    fresh = replace(fresh, reason=f"steps up to {max(left)} are left behind" if left else "")
    # A checkpoint of step 0 is left behind too: nothing of the old lineage comes back.
    over = Move(attempt.generation, NOTHING)
    changed = moved(made(replace(run, decision=fresh, pins=()), attempt), over)
    text = f"{run.job} starts over at step 0, as fresh= asks{left and '; '}{fresh.reason}"
    severity = "warning" if left else "info"
    return Outcome(run=changed, events=(_event(run, "restore_confirmed", text, fresh, severity),))


def _refuse(
    run: Run, decision: Decision, step: int, known: CheckpointId | None, facts: Facts
) -> Outcome:
    """Say why the step that was asked for cannot be restored, and which steps can."""
    if known is not None:
        reason = _missing(run, known, facts)
    elif any(row.id.step == step for row in run.checkpoints):
        reason = "a later restore left it behind, or its objects are being deleted"
    else:
        reason = "the job has no checkpoint of this step"
    others = {key.step for key in _candidates(unbound(run), facts.evidence.sources)}
    named = ", ".join(map(str, sorted(others, reverse=True)[:NAMED_IN_REASON_MAX]))
    text = f"step {step} cannot be restored: {reason}; steps that can: {named or 'none'}"
    lost = replace(
        decision,
        state=DecisionState.LOST,
        checkpoint=None,
        shards=(),
        reason=text,
        refused=True,
    )
    event = _event(run, "restore_refused", f"{run.job}: {text}", lost, "warning")
    return Outcome(run=replace(run, decision=lost, pins=()), events=(event,))


def _lose(run: Run, decision: Decision, newest: CheckpointId, facts: Facts) -> Outcome:
    lost = replace(
        decision,
        state=DecisionState.LOST,
        checkpoint=None,
        shards=(),
        reason=_missing(run, newest, facts),
    )
    text = f"no checkpoint of {run.job} can be read: {lost.reason}"
    changed = replace(run, decision=lost, pins=())
    return Outcome(run=changed, events=(_event(run, "restore_lost", text, lost, "error"),))


def _missing(run: Run, newest: CheckpointId, facts: Facts) -> str:
    """Return as text which shards of the newest checkpoint are missing, and their last nodes."""
    live = facts.evidence.sources.get(newest, {})
    known = facts.evidence.known.get(newest, {})
    row = next((row for row in run.checkpoints if row.id == newest), None)
    sizes = {item.shard.world_size for item in known.values()}
    world_size = row.world_size if row else max(sizes, default=0)
    ranks = sorted(set(range(world_size)) - ranks_of(live))
    name = f"step {newest.step} of attempt {newest.generation}"
    store = _said_of_the_store(row, facts)
    if not ranks:
        return f"{name} has a copy of every shard, but no node delivers them intact{store}"
    named = ", ".join(map(str, ranks[:NAMED_IN_REASON_MAX]))
    more = f" and {len(ranks) - NAMED_IN_REASON_MAX} more" if len(ranks) > 8 else ""
    holders = {n for item in known.values() if item.shard.id.rank in ranks for n in item.nodes}
    where = ", ".join(sorted(holders)[:NAMED_IN_REASON_MAX]) or "an unknown node"
    return f"{name} lacks the shards of ranks {named}{more}; last held by {where}{store}"


def _said_of_the_store(row: Checkpoint | None, facts: Facts) -> str:
    """Return what became of the object store as a source; empty where there is none."""
    if row is None or row.durable_at_s is None:
        return "; the object store does not have it" if facts.limits.object_tier else ""
    if not facts.limits.object_tier:
        return "; the object store has it, but HOLDFAST_STORE is not set for the metadata service"
    if row.bad:
        return "; the object store has it, but with damaged bytes"
    return "; the object store did not deliver it either"


def _event(run: Run, kind: str, text: str, decision: Decision, severity: str = "info") -> Event:
    context = {
        "run": run.id,
        "attempt": str(decision.generation),
        "decision": str(decision.number),
    }
    if decision.checkpoint:
        context["step"] = str(decision.checkpoint.step)
    return Event(kind=kind, severity=severity, message=text, job=run.job, context=context)
