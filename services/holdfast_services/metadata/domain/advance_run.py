"""One step of a run: from what nodes report to levels, decisions and announcements.

``advance`` is total and idempotent: the same facts at the same time change nothing twice. It is
called after each registration, each batch of reports and by the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.abandoned_steps import abandon
from holdfast_services.metadata.domain.attempts import absorb
from holdfast_services.metadata.domain.believed_copies import gather
from holdfast_services.metadata.domain.commit_rule import commit
from holdfast_services.metadata.domain.drains import persist, persist_off
from holdfast_services.metadata.domain.model import Limits, Node, Outcome, Run
from holdfast_services.metadata.domain.notes import annotate
from holdfast_services.metadata.domain.restore_decision import Facts, decide
from holdfast_services.metadata.domain.save_announcement import announce
from holdfast_services.metadata.domain.shortage import allow


def advance(
    run: Run,
    nodes: Mapping[str, Node],
    now_s: float,
    limits: Limits,
    listens_until_s: float = 0.0,
) -> Outcome:
    """Return the run with all that follows from ``nodes`` at ``now_s``, and the news."""
    everybody = tuple(nodes.values())
    live = tuple(node for node in everybody if node.live(now_s))
    stored = run.stored if limits.object_tier else ()
    evidence = gather(run.id, everybody, now_s, stored)
    run = replace(run, generation=counter(run, evidence.generation_max, nodes))
    run = absorb(run, nodes, limits)
    events: list[Event] = []
    outcome = abandon(run, nodes, evidence)
    run, events = outcome.run, [*events, *outcome.events]
    outcome = allow(run, live)
    run, events = outcome.run, [*events, *outcome.events]
    outcome = decide(run, Facts(nodes, evidence, now_s, limits, listens_until_s))
    run, events = outcome.run, [*events, *outcome.events]
    known = {row.id for row in run.checkpoints}
    run = annotate(commit(run, evidence, live, now_s), nodes)
    if limits.object_tier:
        committed = [row for row in run.checkpoints if row.id not in known]
        outcome = persist(run, committed, evidence, nodes, now_s)
    else:
        outcome = persist_off(run)
    run, events = outcome.run, [*events, *outcome.events]
    outcome = announce(run, nodes, now_s)
    return Outcome(run=outcome.run, events=(*events, *outcome.events))


def counter(run: Run, seen: int, nodes: Mapping[str, Node]) -> int:
    """Return the newest generation there is, after one of ``seen`` was found in memory.

    A higher one means that the catalogue was lost, and so does the attempt's own while its
    restore is undecided: it has saved nothing yet, unless its ranks say that they train, which a
    backup may not know. The counter goes above what others have used (P2, P6); an attempt that it
    passes is fenced, and its launcher starts another.
    """
    used = run.deciding and run.current is not None and seen == run.generation
    return seen + 1 if used and not _trains(run, nodes) else max(run.generation, seen)


def _trains(run: Run, nodes: Mapping[str, Node]) -> bool:
    """Tell whether a rank of the newest attempt, and of no namesake, says that it has loaded."""
    mine = (run.id, run.generation, run.attempt.spec.nonce) if run.attempt else ()
    return any(
        status.report.loaded and (status.run, status.generation, status.nonce) == mine
        for node in nodes.values()
        for status in node.inventory.ranks
    )
