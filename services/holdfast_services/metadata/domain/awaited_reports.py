"""Whose word a restore waits for: who may hold shards and has not reported since the attempt began.

The decision waits for them and their views ask them, by the same rule. Source: architecture,
section 4.8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.decision import DecisionState
from holdfast_services.metadata.domain.model import Attempt, Limits, Node, Run


def awaited_reports(
    run: Run, nodes: Mapping[str, Node], now_s: float, limits: Limits
) -> frozenset[str]:
    """Return the nodes that must report before anything is proposed to the run's attempt.

    They have a lease or host one of its ranks. Empty where nothing is to be proposed, and once
    the attempt has waited for as long as it may.
    """
    attempt, decision = run.current, run.decision
    if attempt is None or decision is None or decision.state is not DecisionState.PENDING:
        return frozenset()
    if not attempt.awaits_nodes(now_s, limits):
        return frozenset()
    live = (name for name, node in nodes.items() if node.live(now_s))
    return unheard(attempt, {*live, *(rank.node for rank in run.ranks)}, nodes)


def unheard(attempt: Attempt, names: Collection[str], nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return those of ``names`` that have not reported since the attempt began."""
    return frozenset(
        name
        for name in names
        if name not in nodes or nodes[name].reported_at_s < attempt.started_at_s
    )
