"""What a node is told: everything it acts on, from one snapshot of the catalogue.

``World`` is that snapshot. Nothing in a view changes with a heartbeat alone, unless a restore has
waited for it, so a view's version changes only when there is something to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.decision import Decision
from holdfast.core.ids import ShardId
from holdfast.core.inventory import Peer
from holdfast.core.node_view import Committed, ElementWant, NodeView, RunView, Want
from holdfast.core.protection import NO_COPIES
from holdfast_services.metadata.domain.awaited_reports import awaited_reports
from holdfast_services.metadata.domain.believed_copies import Evidence, gather
from holdfast_services.metadata.domain.commit_rule import free_before
from holdfast_services.metadata.domain.copies_to_fetch import (
    Wants,
    places,
    repairs,
    restores,
    spares,
)
from holdfast_services.metadata.domain.drains import Drained, drained
from holdfast_services.metadata.domain.early_copies import early_copies
from holdfast_services.metadata.domain.elements_to_make import Elements, elements_to_make
from holdfast_services.metadata.domain.going_shards import (
    copies_before_nodes_go,
    from_who_stay,
    going_nodes,
)
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.model import Limits, Node, Run
from holdfast_services.metadata.domain.needed_shards import needed
from holdfast_services.metadata.domain.shortage import awaited, shortage
from holdfast_services.metadata.domain.spare_elements import spare_elements

COMMITTED_IN_VIEW_MAX = 8
DURABLE_IN_VIEW_MIN = 2
ABANDONED_IN_VIEW_MIN = 16
"""Of the newest generation: more than the steps that a rank can wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All nodes and runs as of one transaction, with what follows from them for everybody.

    ``shortages``: why no step of a run gets all its copies; empty also while a node that was lost
    may come back. ``awaited``: the nodes that a run's restore waits for. ``going``: nodes that will
    be taken away, as far as ``launches`` were read.
    """

    now_s: float
    nodes: Mapping[str, Node]
    runs: tuple[Run, ...]
    limits: Limits = field(default_factory=Limits)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    repairs: Mapping[str, Wants] = field(default_factory=dict)
    early_copies: Mapping[str, Wants] = field(default_factory=dict)
    going: Collection[str] = frozenset()
    elements: Mapping[str, Elements] = field(default_factory=dict)
    shortages: Mapping[str, str] = field(default_factory=dict)
    drained: Mapping[str, Drained] = field(default_factory=dict)
    awaited: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def live(self) -> Mapping[str, Node]:
        """The nodes with a lease, by name."""
        return {name: node for name, node in self.nodes.items() if node.live(self.now_s)}

    def awaits_nodes(self, run: Run) -> bool:
        """Tell whether nodes that have not reported since the run's attempt began may still do."""
        return run.attempt is not None and run.attempt.awaits_nodes(self.now_s, self.limits)


def world(
    nodes: Mapping[str, Node],
    runs: tuple[Run, ...],
    now_s: float,
    limits: Limits,
    launches: Sequence[Launch] = (),
) -> World:
    """Return the snapshot with evidence and repairs worked out once for all nodes.

    ``launches`` are all there are; none will do while no run has announced its last step.
    """
    bare = World(now_s=now_s, nodes=nodes, runs=runs, limits=limits)
    everybody = tuple(nodes.values())
    evidence = {run.id: gather(run.id, everybody, now_s, run.stored) for run in runs}
    live = bare.live
    kept = {run.id: drained(run, evidence[run.id]) for run in runs}
    expected = [node for node in everybody if awaited(node, now_s)]
    repaired = {
        run.id: repairs(run, evidence[run.id], live, kept[run.id], awaits=bare.awaits_nodes(run))
        for run in runs
    }
    going = going_nodes(launches)
    moved = copies_before_nodes_go(runs, going, evidence, nodes, repaired, now_s)
    repaired = {run.id: _both(repaired[run.id], moved.get(run.id, {})) for run in runs}
    return replace(
        bare,
        evidence=evidence,
        repairs=repaired,
        going=going,
        early_copies=early_copies(runs, launches, evidence, live, repaired, now_s),
        drained=kept,
        elements={run.id: elements_to_make(run, evidence[run.id], live) for run in runs},
        shortages={run.id: shortage(run, expected) for run in runs},
        awaited={run.id: awaited_reports(run, nodes, now_s, limits) for run in runs},
    )


def node_view(all_of_it: World, name: str) -> NodeView:
    """Return what node ``name`` should know; ``version`` is left empty for the shell to fill."""
    live = all_of_it.live
    mine = all_of_it.nodes.get(name)
    held = {item.shard.id.run for item in mine.inventory.shards} if mine else set()
    if mine:
        held |= {item.element.stripe.checkpoint.run for item in mine.inventory.elements}
    runs: list[RunView] = []
    wanted: list[Want] = []
    spared: list[ShardId] = []
    made: list[ElementWant] = []
    needless: list[str] = []
    for run in all_of_it.runs:
        own = _wants(all_of_it, run, live, name)
        seats = tuple(rank.rank for rank in run.ranks if rank.node == name)
        to_make = all_of_it.elements[run.id].get(name, ())
        if own or to_make or run.id in held or seats:
            view = run_view(run, live, all_of_it.shortages[run.id], seats)
            kept = tuple(all_of_it.drained[run.id].get(name, ()))
            runs.append(replace(view, decision=_decision(run, name, mine), drained=kept))
            wanted.extend(own)
            made.extend(to_make)
        if run.id in held:
            awaits, evidence = all_of_it.awaits_nodes(run), all_of_it.evidence[run.id]
            kept_here = all_of_it.drained[run.id]
            spared.extend(spares(run, evidence, live, name, kept_here, awaits=awaits))
            needless.extend(spare_elements(run, evidence, live, name, awaits=awaits))
    return NodeView(
        version="",
        nodes=peers(live),
        runs=tuple(runs),
        wants=tuple(
            from_who_stay(want, all_of_it.going)
            for want in sorted(wanted, key=lambda want: want.reason)
        ),
        spares=tuple(spared),
        elements=tuple(made),
        spare_elements=tuple(needless),
        awaited_by=tuple(
            run.attempt.spec.nonce
            for run in all_of_it.runs
            if run.attempt and name in all_of_it.awaited[run.id]
        ),
        taken_incarnation=mine.inventory.incarnation if mine else 0,
        taken_sequence=mine.inventory.sequence if mine else 0,
    )


def _wants(all_of_it: World, run: Run, live: Mapping[str, Node], name: str) -> Sequence[Want]:
    """Return what the node should fetch for ``run``: restores first, early copies last.

    A shard may be both: what its ranks load of it may be parts, and they are nobody's copy.
    """
    wanted = restores(run, all_of_it.evidence[run.id], live, name)
    early = all_of_it.early_copies.get(run.id, {}).get(name, ())
    return (*wanted, *all_of_it.repairs[run.id].get(name, ()), *early)


def _both(first: Wants, second: Wants) -> Wants:
    nodes = dict.fromkeys((*first, *second))
    return {node: (*first.get(node, ()), *second.get(node, ())) for node in nodes}


def peers(live: Mapping[str, Node]) -> tuple[Peer, ...]:
    """Return the live nodes as others reach them, by name."""
    return tuple(live[name].inventory.node for name in sorted(live))


def run_view(run: Run, live: Mapping[str, Node], shortage: str, seats: tuple[int, ...]) -> RunView:
    """Return what a node should know of ``run``; ``seats`` are the ranks registered from there."""
    attempt = run.attempt
    return RunView(
        run=run.id,
        job=run.job,
        generation=run.generation,
        world_size=attempt.spec.world_size if attempt else 0,
        ring=places(run, live).ring,
        copies=attempt.allowed.copies if attempt else NO_COPIES,
        committed=_committed(run),
        free_before=free_before(run),
        pinned=tuple(sorted(run.pins)),
        superseded=run.rules,
        abandoned=_abandoned(run),
        announcement=run.announcement,
        shortage=shortage,
        attempt=attempt.generation if attempt else 0,
        nonce=attempt.spec.nonce if attempt else b"",
        seats=seats,
        saving_slots=attempt.spec.saving_slots if attempt else 0,
    )


def _committed(run: Run) -> tuple[Committed, ...]:
    """Return the newest rows, and whatever is older but draining or among the last durable."""
    usable = [row for row in run.checkpoints if run.usable(row.id)]
    durable = [row.id for row in usable if row.stored][:DURABLE_IN_VIEW_MIN]
    named = {row.id for row in usable[:COMMITTED_IN_VIEW_MAX]}.union(durable)
    return tuple(
        Committed(
            checkpoint=row.id,
            replicated=row.replicated_at_s is not None,
            durable=row.stored,
            draining=row.draining,
        )
        for row in usable
        if row.id in named or row.draining
    )


def _abandoned(run: Run) -> tuple[AbandonedStep, ...]:
    """Return the newest of the attempt, and whatever else would not be freed as older anyway.

    Each of them is told of again with every change of a view, to every node of the run.
    """
    if len(run.abandoned) <= ABANDONED_IN_VIEW_MIN:
        return run.abandoned
    mine = sorted(one.step for one in run.abandoned if one.generation == run.generation)
    newest, kept = mine[-ABANDONED_IN_VIEW_MIN:], free_before(run)
    return tuple(
        one
        for one in run.abandoned
        if (one.generation == run.generation and one.step in newest)
        or kept is None
        or one.generation > kept.generation
        or (one.step, one.generation) >= (kept.step, kept.generation)
    )


def _decision(run: Run, host: str, node: Node | None) -> Decision | None:
    """Return the decision; with shards only while ranks on ``host`` have still to load them."""
    if run.decision is None:
        return None
    every = run.decision.shards
    shards = needed(run, host, node) if run.deciding or run.loading else ()
    return replace(
        run.decision,
        shards=tuple(shards),
        shards_count=len(every),
        world_size=every[0].world_size if every else 0,
    )
