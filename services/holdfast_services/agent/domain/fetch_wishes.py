"""Which copies this node should fetch, and which nodes should hold copies of its own. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.facts import Peer, RunView, Shard, Want, WantReason
from holdfast.core.ids import ShardId
from holdfast.core.sources import Memory
from holdfast_services.agent.domain.state import Giver, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A copy that should be fetched, and who gives it, in the order to ask them.

    ``owner`` empty: whoever gives it. ``restore``: a restore waits for it.
    """

    shard: Shard
    sources: tuple[Giver, ...]
    owner: str = ""
    restore: bool = False


def wishes(state: State) -> list[Wish]:
    """What should be fetched and can be, first things first.

    Restores come before repairs, repairs before copies that owners asked for.
    """
    wants = sorted(state.view.wants if state.view else (), key=lambda want: want.reason.value)
    restored = {w.shard.id for w in wants if w.reason is WantReason.RESTORE}
    listed = [Wish(shard=w.shard, sources=_givers(state, w)) for w in wants]
    holds = [
        Wish(shard=h.shard, sources=(h.source,), owner=h.source.node) for h in state.holds.values()
    ]
    first: dict[ShardId, Wish] = {}
    for wish in (*listed, *holds):
        if wish.shard.id not in first and wish.sources:
            first[wish.shard.id] = wish
    copies = state.copies()
    missing = ((key, wish) for key, wish in first.items() if key not in copies)
    return [replace(wish, restore=key in restored) for key, wish in missing]


def _givers(state: State, want: Want) -> tuple[Giver, ...]:
    """Return who gives it and is known here; of the nodes, those that served bad bytes last."""
    bad = {b.source for b in state.bad_sources if b.shard == want.shard.id}
    others = [source for source in want.sources if source != Memory(state.me.node)]
    others.sort(key=lambda source: (not isinstance(source, Memory), source in bad))
    givers = map(state.giver, others)
    return tuple(giver for giver in givers if giver is not None)


def backups_of(state: State, view: RunView) -> tuple[Peer, ...]:
    """The peers that should hold copies of this node's shards of a run."""
    domains = {p.node: p.domain for p in state.view.nodes} if state.view else {}
    names = view.copies.targets(state.me.node, view.ring, domains)
    peers = (state.peer(name) for name in names)
    return tuple(peer for peer in peers if peer is not None)
