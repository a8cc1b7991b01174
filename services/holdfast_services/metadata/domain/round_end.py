"""When a round that goes well may end: after a step that all ranks have saved, so none is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast_services.metadata.domain.believed_copies import gather
from holdfast_services.metadata.domain.going_shards import going_shards
from holdfast_services.metadata.domain.launch import Launch, RoundEnd
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.domain.save_announcement import NEWS_TRAVEL_S, training

PATIENCE_S = 300.0
"""So long a run that trains beside others may take to save: then those decide that have."""


def is_safe(
    runs: Sequence[Run],
    nodes: Mapping[str, Node],
    end: RoundEnd,
    now_s: float,
    going: Collection[str] = (),
) -> bool:
    """Tell whether the round that trains ``runs`` may end now: each has saved its last step.

    Of a run whose ranks have all closed nothing is awaited. Without a run there is no such step.
    ``going``: nodes that will be taken away.
    """
    safe = [
        _has_saved(run, nodes, end, now_s, going)
        for run in runs
        if any(rank.live for rank in run.ranks)
    ]
    late = now_s > end.asked_at_s + PATIENCE_S
    return any(safe) and (late or all(safe))


def is_recent(launch: Launch, now_s: float) -> bool:
    """Tell whether the end of its round was asked for so lately that ranks may wait for it."""
    return launch.end is not None and now_s <= launch.end.asked_at_s + PATIENCE_S


def _has_saved(
    run: Run, nodes: Mapping[str, Node], end: RoundEnd, now_s: float, going: Collection[str]
) -> bool:
    """Tell whether the step is committed that was announced as the last one.

    So may be a later one, which ranks reach if that took too long; or any of a script that calls
    ``save`` by itself, and hears of no announcement. Its ranks say no step at all; those of
    others may say it a moment after an agent has found what they saved.
    """
    statuses, announced = training(run, nodes), run.announcement
    if statuses is None or announced is None or not announced.reason.ends_round:
        return False
    silent = all(status.report.step == 0 for status in statuses.values())
    rows = [r for r in run.checkpoints if r.id.generation == run.generation and run.usable(r.id)]
    saved = [
        r
        for r in rows
        if r.id.step >= announced.step
        or (silent and end.asked_at_s < r.local_at_s < now_s - NEWS_TRAVEL_S)
    ]
    if not (saved and end.copied):
        return bool(saved)
    if not going:
        return any(row.acknowledged for row in saved)
    sources = gather(run.id, tuple(nodes.values()), now_s, run.stored).sources
    return any(not going_shards(sources.get(row.id, {}), going) for row in saved)
