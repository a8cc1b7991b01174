"""Copies beside the owner's: how many the policy asks for, how many the nodes at hand allow (F54).

With too few nodes as many copies are made as there is room for, and older slots are freed by
these; the level ``replicated`` is not reached. Two nodes of one failure domain count once where
the policy asks for domains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.ids import ShardId
from holdfast.core.protection import NO_COPIES, Domains, Parity, Protection
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.believed_copies import CheckpointCopies, holders_in
from holdfast_services.metadata.domain.held_stripes import HeldStripe
from holdfast_services.metadata.domain.model import Node, Outcome, Run

NODE_AWAITED_S = 30.0
"""How long a node that went silent may still come back, so that a wait for copies goes on."""


def domains_of(nodes: Iterable[Node]) -> Domains:
    """Return the failure domain of each node; empty: the node fails alone."""
    return {node.name: node.inventory.node.domain for node in nodes}


def allow(run: Run, live: Iterable[Node]) -> Outcome:
    """Return the run with the copies that the live nodes allow, and an event if these are fewer."""
    attempt = run.current
    if attempt is None:
        return Outcome(run=run)
    domains = domains_of(live)
    allowed = attempt.protection.within(domains, domains)
    if allowed == attempt.allowed:
        return Outcome(run=run)
    changed = replace(run, attempt=replace(attempt, allowed=allowed))
    if allowed.losses > attempt.allowed.losses:
        return Outcome(run=changed)
    event = Event(
        kind="replication_cut",
        severity="warning",
        message=f"steps of {run.job} stay local: {_short(attempt.protection, domains)}",
        job=run.job,
        context={"run": run.id, "replicas": str(allowed.copies.n)},
    )
    return Outcome(run=changed, events=(event,))


def shortage(run: Run, nodes: Iterable[Node]) -> str:
    """Return why no step gets all its copies while there are only ``nodes``; empty: it does."""
    asked = run.current.protection if run.current else NO_COPIES
    domains = domains_of(nodes)
    return _short(asked, domains) if asked.within(domains, domains) != asked else ""


def awaited(node: Node, now_s: float) -> bool:
    """Tell whether the node lives, or was lost so lately that it may only be restarting."""
    return node.live(now_s) or node.reported_at_s + NODE_AWAITED_S > now_s


def spread(
    asked: Protection,
    copies: CheckpointCopies,
    domains: Domains,
    stripes: Iterable[HeldStripe] = (),
) -> bool:
    """Tell whether each shard has as many copies, as far apart, as ``asked``, or its elements."""
    bare = {key for key, item in copies.items() if not asked.met(item.nodes, domains)}
    return not bare or bare <= striped(asked, copies, domains, stripes)


def striped(
    asked: Protection,
    copies: CheckpointCopies,
    domains: Domains,
    stripes: Iterable[HeldStripe],
) -> frozenset[ShardId]:
    """Return the shards whose stripes outlive as many losses as ``asked``."""
    if not isinstance(asked, Parity):
        return frozenset()
    holders = holders_in(copies)
    return frozenset(
        shard.id
        for held in stripes
        if held.survives(asked, holders, domains)
        for shard in held.stripe.members
    )


def _short(asked: Protection, domains: Domains) -> str:
    room = len({asked.place(node, domains) for node in domains})
    needed = asked.places_min
    what = f"failure domains ({asked.domain})" if asked.domain else "nodes"
    verb = "is" if room == 1 else "are"
    return f"{asked} needs {needed} live {what}, but only {room} {verb} there"
