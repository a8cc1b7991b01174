"""What only nodes hold that will be taken away: others fetch it while there is time (ADR 0077).

That is of the last step of a round. An older one is not moved: it would take the time, and the
room, of the last one, which is there soon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.node_view import Want, WantReason
from holdfast.core.placement import place
from holdfast.core.sources import Memory
from holdfast.core.user_events import Event
from holdfast_services.metadata.domain.attempts import status_by_rank
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    ShardCopies,
)
from holdfast_services.metadata.domain.copies_to_fetch import Places, Wants, places, want_of
from holdfast_services.metadata.domain.early_copies import has_last_step, last_step, room_left
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.model import Node, Run

RANKS_NAMED_MAX = 8


def going_nodes(launches: Iterable[Launch]) -> frozenset[str]:
    """Return the nodes of which any launcher says that they will be taken away."""
    return frozenset(o.node for launch in launches for o in launch.launchers if o.goes_at_s)


def going_shards(copies: CheckpointCopies, going: Collection[str]) -> tuple[ShardCopies, ...]:
    """Return the shards of a checkpoint that go with the nodes: nobody who stays has them."""
    return tuple(item for _, item in sorted(copies.items()) if _goes(item, going))


def copies_before_nodes_go(
    runs: Sequence[Run],
    going: Collection[str],
    evidence: Mapping[str, Evidence],
    nodes: Mapping[str, Node],
    repairs: Mapping[str, Wants],
    now_s: float,
) -> Mapping[str, Wants]:
    """Return run -> node -> copies of what goes with nodes: each on one that stays, if any can.

    That is the next one of the ring that has room, of a rank and in another failure domain first.
    What comes to one that stays anyway, by its ``repairs``, is not named again.
    """
    found: dict[str, Wants] = {}
    if not going:
        return found
    live = {name: node for name, node in nodes.items() if node.live(now_s)}
    left_bytes = room_left(live, repairs)
    for run in runs:
        key = _moved(run, nodes, now_s)
        copies = evidence[run.id].sources.get(key, {}) if key else {}
        coming = _coming(repairs.get(run.id, {}), going)
        where = places(run, live)
        wanted: dict[str, list[Want]] = {}
        for item in going_shards(copies, going):
            node = _target(run, item, where, going, left_bytes)
            if node is None or item.shard.id in coming:
                continue
            left_bytes[node] -= item.shard.length_bytes
            wanted.setdefault(node, []).append(want_of(item, WantReason.REPAIR, 0))
        found[run.id] = {node: tuple(wants) for node, wants in wanted.items()}
    return found


def from_who_stay(want: Want, going: Collection[str]) -> Want:
    """Return a want whose sources that go come last, so that these serve what nobody else can."""
    kept = [s for s in want.sources if not (isinstance(s, Memory) and s.node in going)]
    rest = [s for s in want.sources if s not in kept]
    return replace(want, sources=(*kept, *rest)) if rest else want


def notice_over(
    run: Run, evidence: Evidence, nodes: Mapping[str, Node], going: Collection[str], now_s: float
) -> Event | None:
    """Return what people are told of a run whose round ends as there is no time any more.

    None: nothing of it goes with a node.
    """
    over = f"{run.job}: the notice of node {', '.join(sorted(going))} is over"
    key = _moved(run, nodes, now_s)
    if key is None:
        text = f"{over} and no last step was saved: what came after the newest one is done again"
        return _event(run, text, {})
    items = going_shards(evidence.sources.get(key, {}), going)
    if not items:
        return None
    ranks = [str(item.shard.id.rank) for item in items]
    more = f" and {len(ranks) - RANKS_NAMED_MAX} more" if ranks[RANKS_NAMED_MAX:] else ""
    named = f"{', '.join(ranks[:RANKS_NAMED_MAX])}{more}"
    text = f"{over}, and of step {key.step} it alone has the shards of ranks {named}"
    return _event(run, text, {"step": str(key.step), "ranks": ",".join(ranks)})


def _goes(item: ShardCopies, going: Collection[str]) -> bool:
    stays = any(node not in going for node in item.nodes)
    return not (stays or item.object or _is_rebuilt(item, going))


def _is_rebuilt(item: ShardCopies, going: Collection[str]) -> bool:
    """Tell whether a shard follows from what others have who stay."""
    pieces = item.rebuilt.pieces if item.rebuilt else ()
    return bool(pieces) and all(set(piece.nodes).difference(going) for piece in pieces)


def _moved(run: Run, nodes: Mapping[str, Node], now_s: float) -> CheckpointId | None:
    """Return the last step of the round, once it is committed.

    Of a script that calls ``save`` by itself, whose ranks say no step, that is its next one.
    """
    if not has_last_step(run, now_s):
        return None
    last = last_step(run, now_s)
    if last or any(status.report.step for status in status_by_rank(run, nodes).values()):
        return last
    mine = [r for r in run.checkpoints if r.id.generation == run.generation and run.usable(r.id)]
    return max((r.id for r in mine if r.local_at_s > run.announced_at_s), default=None)


def _coming(wants: Wants, going: Collection[str]) -> frozenset[ShardId]:
    staying = (items for node, items in wants.items() if node not in going)
    return frozenset(want.shard.id for items in staying for want in items)


def _target(
    run: Run,
    item: ShardCopies,
    where: Places,
    going: Collection[str],
    left_bytes: Mapping[str, int],
) -> str | None:
    taken = {place(node, where.domains) for node in item.nodes}
    ranks = {rank.node for rank in run.ranks}
    start = where.turns.get(item.owner, -1) + 1
    walk = (*where.ring[start:], *where.ring[:start])
    fit = [n for n in walk if n not in going and left_bytes[n] >= item.shard.length_bytes]
    fit.sort(key=lambda node: (place(node, where.domains) in taken, node not in ranks))
    return fit[0] if fit else None


def _event(run: Run, text: str, context: Mapping[str, str]) -> Event:
    return Event(
        kind="notice_over", severity="warning", message=text, job=run.job,
        context={"run": run.id, **context},
    )  # fmt: skip
