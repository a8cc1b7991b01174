"""Copies beside the owner's: how many the policy asks for, how many the nodes at hand allow (F54).

With too few nodes as many copies are made as there is room for, and older slots are freed by
these; the level ``replicated`` is not reached. Two nodes of one failure domain count once where
the policy asks for domains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.core.facts import Event
from holdfast_services.metadata.domain.evidence import CheckpointCopies
from holdfast_services.metadata.domain.model import Attempt, Node, Outcome, Run

NODE_AWAITED_S = 30.0
"""How long a node that went silent may still come back, so that a wait for copies goes on."""


def domains_of(nodes: Iterable[Node]) -> Mapping[str, str]:
    """Return node -> failure domain; a node that names none is one by itself."""
    return {
        node.name: f"domain:{node.inventory.node.domain}"
        if node.inventory.node.domain
        else f"node:{node.name}"
        for node in nodes
    }


def allow(run: Run, live: Iterable[Node]) -> Outcome:
    """Return the run with ``replicas_allowed`` as the live nodes have it; fewer is news."""
    attempt = run.current
    if attempt is None:
        return Outcome(run=run)
    room = _room(attempt, live)
    allowed = max(0, min(attempt.spec.replicas, room - 1))
    if allowed == attempt.replicas_allowed:
        return Outcome(run=run)
    changed = replace(run, attempt=replace(attempt, replicas_allowed=allowed))
    if allowed > attempt.replicas_allowed:
        return Outcome(run=changed)
    event = Event(
        kind="replication_cut",
        severity="warning",
        message=f"steps of {run.job} stay local: {_short(attempt, room)}",
        job=run.job,
        context={"run": run.id, "replicas": str(allowed)},
    )
    return Outcome(run=changed, events=(event,))


def shortage(run: Run, nodes: Iterable[Node]) -> str:
    """Return why no step gets all its copies while there are only ``nodes``; empty: it does."""
    attempt = run.current
    room = _room(attempt, nodes) if attempt else 0
    return _short(attempt, room) if attempt and max(room, 1) <= attempt.spec.replicas else ""


def awaited(node: Node, now_s: float) -> bool:
    """Tell whether the node is there, or went so lately that it may only be restarting."""
    return node.live(now_s) or node.reported_at_s + NODE_AWAITED_S > now_s


def spread(
    attempt: Attempt, copies: CheckpointCopies, places: Mapping[str, str], replicas: int
) -> bool:
    """Tell whether each shard has ``replicas`` copies beside the owner's, in as many places."""
    held = (
        {places[node] for node in item.nodes} if attempt.spec.replica_domain else item.nodes
        for item in copies.values()
    )
    return all(len(where) > replicas for where in held)


def _room(attempt: Attempt, nodes: Iterable[Node]) -> int:
    places = domains_of(nodes)
    return len(set(places.values()) if attempt.spec.replica_domain else places)


def _short(attempt: Attempt, room: int) -> str:
    spec = attempt.spec
    what = f"failure domains ({spec.replica_domain})" if spec.replica_domain else "nodes"
    return f"replicas={spec.replicas} needs {spec.replicas + 1} live {what}, there is {room}"
