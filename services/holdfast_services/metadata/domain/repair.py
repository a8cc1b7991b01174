"""Which copies a node should fetch: first what its ranks must load, then copies that were lost.

Deterministic, so that every metadata process tells every node the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.facts import DecisionState, Want, WantReason
from holdfast.core.ids import CheckpointId
from holdfast.core.placement import backups, ring
from holdfast_services.metadata.domain.commit import domains_of, keep_from
from holdfast_services.metadata.domain.evidence import Copies, Evidence
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.domain.restore import bad_sources

SOURCES_PER_WANT_MAX = 8

Wants = Mapping[str, tuple[Want, ...]]


@dataclass(frozen=True, slots=True)
class Places:
    """The live nodes in placement order and where they stand."""

    live: Mapping[str, Node]
    ring: tuple[str, ...]
    domains: Mapping[str, str]


def places(run: Run, live: Mapping[str, Node]) -> Places:
    """Return the placement of the run's newest attempt over the live nodes."""
    order = ring({rank.rank: rank.node for rank in run.ranks}, sorted(live))
    return Places(live, order, domains_of(live.values()))


def wants(run: Run, evidence: Evidence, live: Mapping[str, Node]) -> Wants:
    """Return node -> copies it should fetch for ``run``, restores first."""
    where = places(run, live)
    found: dict[str, dict[object, Want]] = {}
    for node, want in (*_restores(run, evidence, where), *_repairs(run, evidence, where)):
        found.setdefault(node, {}).setdefault(want.shard.id, want)
    return {node: tuple(items.values()) for node, items in found.items()}


def _restores(run: Run, evidence: Evidence, where: Places) -> Sequence[tuple[str, Want]]:
    decision = run.decision
    if decision is None or decision.checkpoint is None or run.current is None:
        return ()
    if decision.state is not DecisionState.PROPOSED and not run.loading:
        return ()
    copies = evidence.live.get(decision.checkpoint, {})
    found: list[tuple[str, Want]] = []
    for host in sorted({rank.node for rank in run.ranks if not rank.loaded} & where.live.keys()):
        bad = bad_sources(where.live[host], decision.number)
        for shard in decision.shards:
            item = copies.get(shard.id)
            if item is None or item.shard != shard or host in item.nodes:
                continue
            sources = [n for n in _sources(item, host, where) if (shard.id, n) not in bad]
            found.append((host, _want(item, sources, WantReason.RESTORE)))
    return found


def _repairs(run: Run, evidence: Evidence, where: Places) -> Sequence[tuple[str, Want]]:
    if run.attempt is None or run.deciding:
        return ()
    found: list[tuple[str, Want]] = []
    for key in _protected(run):
        for _, item in sorted(evidence.live.get(key, {}).items()):
            found.extend(
                (node, _want(item, _sources(item, node, where), WantReason.REPAIR))
                for node in _fetchers(run, item, where)
            )
    return found


def _protected(run: Run) -> tuple[CheckpointId, ...]:
    """Return the checkpoints whose copies are made up: the one kept, and a restored newest one.

    The newest step of the running attempt is not among them: its owners replicate it.
    """
    newest = max((row.id for row in run.checkpoints if run.usable(row.id)), default=None)
    restored = newest if newest and newest.generation < run.generation else None
    return tuple(dict.fromkeys(key for key in (keep_from(run), restored) if key))


def _fetchers(run: Run, item: Copies, where: Places) -> tuple[str, ...]:
    """Return the nodes that should get a copy: the owner if it came back empty, then backups.

    At most as many as are missing; with failure domains, none in a domain that has a copy.
    """
    attempt = run.attempt
    if attempt is None:
        return ()
    spread = where.domains if attempt.replica_domain else None
    order = backups(item.owner, where.ring, replicas=attempt.replicas_cut, domains=spread)
    walk = dict.fromkeys((item.owner, *order, *where.ring))
    used = {_place(node, spread) for node in item.nodes if node in where.live}
    missing = 1 + attempt.replicas_cut - len(used)
    chosen: list[str] = []
    for node in walk:
        if len(chosen) >= missing:
            break
        if node not in where.live or node in item.nodes or _place(node, spread) in used:
            continue
        chosen.append(node)
        used.add(_place(node, spread))
    return tuple(chosen)


def _place(node: str, spread: Mapping[str, str] | None) -> str:
    return spread.get(node, f"node:{node}") if spread else node


def _sources(item: Copies, fetcher: str, where: Places) -> list[str]:
    """Return who serves the shard, turned by the fetcher's place so that load is spread."""
    nodes = [node for node in item.nodes if node != fetcher]
    if not nodes:
        return []
    turn = where.ring.index(fetcher) % len(nodes) if fetcher in where.ring else 0
    return [*nodes[turn:], *nodes[:turn]]


def _want(item: Copies, sources: Sequence[str], reason: WantReason) -> Want:
    return Want(shard=item.shard, sources=tuple(sources[:SOURCES_PER_WANT_MAX]), reason=reason)
