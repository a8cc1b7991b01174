"""Which copies should be fetched now, or parts of them, from whom, and what first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import Peer
from holdfast.core.node_view import RunView, Want, WantReason
from holdfast.core.shard import Shard
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import slot_rules
from holdfast_services.agent.domain.state import Giver, Rebuilding, State
from holdfast_services.agent.domain.wanted_parts import WantedParts, has_parts, length_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A copy that should be fetched, and who gives it, in the order to ask them.

    ``owner`` is the node whose trainer wrote it, empty: whoever gives it; ``asked``: it asks for
    this copy. ``restore``: it comes before the leases of ranks that have not begun. With ``parts``
    they are all that ranks here wait for, and what is fetched is a copy to nobody else.
    """

    shard: Shard
    sources: tuple[Giver, ...]
    owner: str = ""
    asked: bool = False
    restore: bool = False
    parts: frozenset[int] = frozenset()

    @property
    def length_bytes(self) -> int:
        """How many bytes are fetched."""
        length = self.shard.length_bytes
        return length_of(self.parts, length) if self.parts else length


def wishes(state: State) -> list[Wish]:
    """Return the copies that should and can be fetched, the most urgent first.

    Restores come before repairs, repairs before copies that owners asked for. While parts of a
    shard are on their way for a restore, the whole of it waits.
    """
    told = state.view.wants if state.view else ()
    wants = [want for want in told if want.reason is not WantReason.HEAD]
    wants.sort(key=lambda want: want.reason.value)
    if not (wants or state.holds):
        return []
    wanted = WantedParts(state)
    listed = [wish for want in wants if (wish := _listed(state, want, wanted)) is not None]
    restored = {wish.shard.id for wish in listed if wish.restore}
    holds = [
        Wish(shard=h.shard, sources=(h.source,), owner=h.source.node, asked=True)
        for h in state.holds.values()
    ]
    copies = state.copies()
    first: dict[ShardId, Wish] = {}
    for wish in (*listed, *holds):
        key = wish.shard.id
        if key not in copies and wish.sources:
            first.setdefault(key, replace(wish, restore=key in restored))
    return list(first.values())


def heads(state: State, checkpoint: CheckpointId) -> Mapping[int, tuple[Shard, Rebuilding]]:
    """Return, by rank, the shards of a checkpoint whose heads nobody has, and how to make them."""
    found: dict[int, tuple[Shard, Rebuilding]] = {}
    for want in state.view.wants if state.view else ():
        if want.shard.id.checkpoint != checkpoint or want.shard.id.volume:
            continue
        for giver in _givers(state, want):
            if isinstance(giver, Rebuilding):
                found[want.shard.id.rank] = want.shard, giver
    return found


def _listed(state: State, want: Want, wanted: WantedParts) -> Wish | None:
    """Return what a want of the catalogue comes to here; None: there is nothing to fetch for it."""
    restore = want.reason is WantReason.RESTORE
    parts = wanted.of(want.shard) if restore else None
    if parts is not None and (not parts or _are_here(state, want.shard.id, parts)):
        return None
    return Wish(
        shard=want.shard,
        sources=_givers(state, want),
        owner=want.owner,
        restore=restore or is_restoring(state, want.shard.id.run),
        parts=parts or frozenset(),
    )


def is_restoring(state: State, run: str) -> bool:
    """Tell whether a restore goes on: is proposed, or ranks here have yet to load it.

    A repair makes room for it then, on another node too, or makes safe what is restored.
    """
    view = state.run(run)
    decision = view.decision if view else None
    if decision is None or not slot_rules.restoring(decision):
        return False
    return decision.state is DecisionState.PROPOSED or any(
        session.active
        and not session.loaded
        and slot_rules.decision_for(state, session) is decision
        for session in state.sessions.values()
    )


def _are_here(state: State, shard: ShardId, parts: frozenset[int]) -> bool:
    slot = state.partials().get(shard)
    return slot is not None and has_parts(state, slot, parts)


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
