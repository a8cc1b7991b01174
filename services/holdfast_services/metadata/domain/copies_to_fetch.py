"""Which copies a node should fetch: first what its ranks must load, then copies that were lost.

Deterministic, so that every metadata process tells every node the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from holdfast.core.budget import SLOTS_PER_RANK
from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldState
from holdfast.core.node_view import Want, WantReason
from holdfast.core.placement import ring
from holdfast.core.protection import NO_COPIES, Copies, Protection
from holdfast.core.sources import Memory, Object, Rebuilt, Source
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    ShardCopies,
    whole,
)
from holdfast_services.metadata.domain.commit_rule import acknowledged, free_before
from holdfast_services.metadata.domain.drains import Drained
from holdfast_services.metadata.domain.model import Attempt, Node, Run
from holdfast_services.metadata.domain.needed_shards import have_to_name, needed
from holdfast_services.metadata.domain.restore_decision import bad_sources
from holdfast_services.metadata.domain.shortage import domains_of, spread, striped

NODES_PER_WANT_MAX = 8
SPARES_IN_VIEW_MAX = 64
"""Named at a time; once they are given back and reported, others are."""

Wants = Mapping[str, tuple[Want, ...]]
_Bad = Collection[tuple[ShardId, Source]]


@dataclass(frozen=True, slots=True)
class Places:
    """The live nodes in placement order and where they stand; ``turns`` are places in the ring."""

    live: Mapping[str, Node]
    ring: tuple[str, ...]
    domains: Mapping[str, str]
    turns: Mapping[str, int]
    _placed: dict[tuple[Copies, str], tuple[str, ...]] = field(default_factory=dict)

    def placed(self, asked: Copies, owner: str) -> tuple[str, ...]:
        """Return where the rule places an owner's shards, itself first; the ring is walked once."""
        found = self._placed.get((asked, owner))
        if found is None:
            found = (owner, *asked.targets(owner, self.ring, self.domains))
            self._placed[asked, owner] = found
        return found


def places(run: Run, live: Mapping[str, Node]) -> Places:
    """Return the placement of the run's newest attempt over the live nodes."""
    order = ring({rank.rank: rank.node for rank in run.ranks}, sorted(live))
    turns = {node: turn for turn, node in enumerate(order)}
    return Places(live, order, domains_of(live.values()), turns)


def restores(run: Run, evidence: Evidence, live: Mapping[str, Node], host: str) -> Sequence[Want]:
    """Return what ``host`` must fetch so that its ranks can load the decision's checkpoint."""
    decision = run.decision
    if decision is None or decision.checkpoint is None or run.current is None:
        return ()
    if decision.state is not DecisionState.PROPOSED and not run.loading:
        return ()
    if host not in live:
        return ()
    copies = evidence.sources.get(decision.checkpoint, {})
    bad = bad_sources(live[host], decision.number)
    turn = sorted(live).index(host)
    found = []
    for shard in needed(run, host, live[host]):
        item = copies.get(shard.id)
        if item is None or item.shard != shard or host in item.nodes:
            continue
        found.append(want_of(item, WantReason.RESTORE, turn, bad))
    if have_to_name(run, host, live[host]):
        # Whoever names what it needs looks at heads first; of these nobody can read one.
        named = {want.shard.id for want in found}
        lost = (item for _, item in sorted(copies.items()) if item.rebuilt and not item.nodes)
        found += [want_of(i, WantReason.HEAD, turn, bad) for i in lost if i.shard.id not in named]
    return found


def spares(
    run: Run,
    evidence: Evidence,
    live: Mapping[str, Node],
    host: str,
    drained: Drained,
    *,
    awaits: bool,
) -> Sequence[ShardId]:
    """Return copies on ``host`` beyond those that the policy asks for, in the order to drop them.

    Restores and repairs make them, and until a later step is acknowledged none of them is let go:
    what comes next might find no room. Those that are placed by the rule stay, so that what a node
    must keep is within its sum (P8). Nor is, once a restore is proposed, what is older than the
    newest acknowledged step, though that would have gone otherwise, or than the newest that lies
    as the policy asks where the catalogue knows of none; or older than the chosen one
    and nowhere whole, so that nobody can go back to it; or newer and nowhere whole, unless
    ``awaits``: a node may bring the rest yet. What can be gone back to is kept until the chosen one
    was read; but once that lies as the policy asks, one copy of each shard is enough, since a ring
    that has turned leaves more on one node, and less on others, than the sum has. So it is of a
    step that was never more than ``local``: no node may be lost with it anyway. None before all
    ranks are there and something is chosen: until then placement changes, and anything may be
    needed. What drains goes by these rules but where its owner has a slot for it; another node that
    keeps it for a lost owner has none, so there it goes like all that is old, restore or not.
    """
    attempt = run.attempt
    gone, staying = given_up(run, evidence, live, awaits=awaits)
    if attempt is None or host not in live or staying is None:
        return ()
    chosen = _restored(run)
    safe = chosen is not None and _lies_as_allowed(evidence, chosen, attempt, live)
    local = {row.id for row in run.checkpoints if not (row.replicated_at_s or row.copied_at_s)}
    keeping = Keeping(run, evidence, live, attempt.allowed)
    firm, freed = _with_a_slot(run, attempt), free_before(run)
    here = frozenset(drained.get(host, ()))
    redundant: list[ShardId] = []
    old: list[ShardId] = []
    second: list[ShardId] = []
    for held in live[host].inventory.shards:
        shard = held.shard.id
        item = evidence.live.get(shard.checkpoint, {}).get(shard)
        if item is None or shard.checkpoint in staying or host not in item.nodes:
            continue
        drains = shard in here
        if drains and item.owner == host and shard.checkpoint in firm:
            continue
        lost = drains and item.owner != host and _is_before(shard.checkpoint, freed)
        if lost or gone(shard.checkpoint):
            old.append(shard)
            continue
        behind = _is_behind(shard.checkpoint, chosen) and (safe or shard.checkpoint in local)
        if keeping.is_redundant(item, host):
            redundant.append(shard)
        elif behind and len(item.nodes) > 1 and host not in keeping.keepers(item, NO_COPIES):
            second.append(shard)
        if len(redundant) >= SPARES_IN_VIEW_MAX:
            break
    return (*redundant, *old, *second)[:SPARES_IN_VIEW_MAX]


def given_up(
    run: Run, evidence: Evidence, live: Mapping[str, Node], *, awaits: bool
) -> tuple[Callable[[CheckpointId], bool], Collection[CheckpointId | None] | None]:
    """Return what says which checkpoints nobody goes back to, and those of which nothing is spare.

    None in their place: nothing at all is spare yet; see ``spares``.
    """
    attempt, decision = run.attempt, run.decision
    settled = decision is not None and decision.state in _SETTLED
    if attempt is None or not settled or len(run.ranks) < attempt.spec.world_size:
        return (lambda _: False), None
    chosen = _restored(run)
    kept = (acknowledged(run) or _lying(run, evidence, chosen, live)) if chosen else None
    parts = _in_parts(run, evidence, chosen, awaits) if chosen else frozenset[CheckpointId]()

    def gone(key: CheckpointId) -> bool:
        return _is_before(key, kept) or key in parts

    return gone, _staying(run, chosen)


def _restored(run: Run) -> CheckpointId | None:
    """Return what is being restored; None: nothing is."""
    return run.decision.checkpoint if run.decision and (run.deciding or run.loading) else None


class Keeping:
    """Who keeps a shard of which there are more copies than are asked for."""

    def __init__(
        self, run: Run, evidence: Evidence, live: Mapping[str, Node], asked: Protection
    ) -> None:
        self._run, self._evidence, self._live, self.asked = run, evidence, live, asked
        self._striped: dict[CheckpointId, frozenset[ShardId]] = {}

    @cached_property
    def where(self) -> Places:
        """Where nodes stand; most nodes never ask."""
        return places(self._run, self._live)

    def is_redundant(self, item: ShardCopies, host: str) -> bool:
        """Tell whether as many others keep a shard as it takes."""
        return len(item.nodes) > 1 and host not in self.keepers(item, self._needed(item))

    def kept(self, key: CheckpointId) -> CheckpointCopies:
        """Return the copies of a checkpoint that are left once the redundant are given back."""
        return {
            shard: replace(item, nodes=tuple(self.keepers(item, self._needed(item))))
            for shard, item in self._evidence.live.get(key, {}).items()
        }

    def _needed(self, item: ShardCopies) -> Copies:
        """Return the copies that a shard takes; one that a stripe protects takes its own alone."""
        striped_too = item.shard.id in self._striped_shards(item.shard.id.checkpoint)
        return NO_COPIES if striped_too else Copies(self.asked.losses, self.asked.domain)

    def keepers(self, item: ShardCopies, asked: Copies) -> Sequence[str]:
        """Return the holders that keep a shard; see ``_keepers``."""
        return _keepers(item, asked, self.where)

    def _striped_shards(self, key: CheckpointId) -> frozenset[ShardId]:
        """Return the shards that stripes protect also if each lies with one node alone."""
        stripes = self._evidence.stripes.get(key, ())
        if not stripes:
            return frozenset()
        if key not in self._striped:
            copies = self._evidence.live.get(key, {})
            kept = {
                shard: replace(item, nodes=tuple(self.keepers(item, NO_COPIES)))
                for shard, item in copies.items()
            }
            self._striped[key] = striped(self.asked, kept, self.where.domains, stripes)
        return self._striped[key]


def _staying(run: Run, chosen: CheckpointId | None) -> Collection[CheckpointId | None]:
    """Return the checkpoints of which no copy is given back: what is restored, pinned."""
    return {chosen, *run.pins}


def _with_a_slot(run: Run, attempt: Attempt) -> Collection[CheckpointId]:
    """Return the draining checkpoints that the slots of their ranks are counted for (P8)."""
    more = max(attempt.spec.slots_per_rank - SLOTS_PER_RANK, 0)
    return [drain.checkpoint for drain in run.drains[:more]]


def _is_before(key: CheckpointId, kept: CheckpointId | None) -> bool:
    return kept is not None and key.generation <= kept.generation and key < kept


def _lying(
    run: Run, evidence: Evidence, chosen: CheckpointId, live: Mapping[str, Node]
) -> CheckpointId | None:
    """Return the newest checkpoint up to ``chosen`` that lies as the policy asks.

    A catalogue that was lost does not know what was acknowledged: nodes may be lost with this one.
    Where no copies are asked for none does: the only one may be bad, and nobody has read it yet.
    """
    asked = run.attempt.protection if run.attempt else NO_COPIES
    if not asked.losses:
        return None
    domains = domains_of(live.values())
    lying = (
        key
        for key, copies in evidence.live.items()
        if (key == chosen or _is_behind(key, chosen)) and key not in run.rejected
        if run.usable(key) and whole(copies)
        if spread(asked, copies, domains, evidence.stripes.get(key, ()))
    )
    return max(lying, default=None)


def _lies_as_allowed(
    evidence: Evidence, chosen: CheckpointId, attempt: Attempt, live: Mapping[str, Node]
) -> bool:
    """Tell whether ``chosen`` outlives the nodes that may be lost, so that nothing else has to."""
    copies = evidence.live.get(chosen, {})
    stripes = evidence.stripes.get(chosen, ())
    return whole(copies) and spread(attempt.allowed, copies, domains_of(live.values()), stripes)


def _is_behind(key: CheckpointId, chosen: CheckpointId | None) -> bool:
    """Tell whether a restore of ``chosen`` goes back to ``key`` only if it fails."""
    return chosen is not None and key < chosen and key.generation <= chosen.generation


def _in_parts(
    run: Run, evidence: Evidence, chosen: CheckpointId, awaits: bool
) -> frozenset[CheckpointId]:
    """Return what attempts before left whole nowhere, by the last word of any node.

    What is newer than ``chosen`` only once no node is awaited any more: one may bring the rest.
    """
    left = (
        key
        for key in evidence.known
        if _is_behind(key, chosen) or (key.generation < run.generation and not awaits)
    )
    sources = evidence.sources
    return frozenset(
        key for key in left if not whole(evidence.known[key]) and not whole(sources.get(key, {}))
    )


_SETTLED = (DecisionState.PROPOSED, DecisionState.CONFIRMED)


def _keepers(item: ShardCopies, asked: Copies, where: Places) -> Sequence[str]:
    """Return the holders that keep a shard: by the rule, else the next ones, apart if they can.

    The owner, or without it the first by name, is among them whatever the ring is: agents that act
    on views of different attempts do not all give up the same copy.
    """
    turns = where.turns
    start = turns.get(item.owner, -1)
    first = item.owner if item.owner in item.nodes else min(item.nodes)
    others = [node for node in item.nodes if node != first]
    others.sort(key=lambda node: (turns.get(node, 0) - start) % (len(turns) or 1))
    holders = [first, *others]
    leading = {asked.place(node, where.domains): node for node in reversed(holders)}.values()
    apart = [*(n for n in holders if n in leading), *(n for n in holders if n not in leading)]
    return apart[: 1 + asked.n]


def repairs(
    run: Run, evidence: Evidence, live: Mapping[str, Node], drained: Drained, *, awaits: bool
) -> Wants:
    """Return node -> copies it should fetch because some were lost.

    While a restore is decided none, but what must move before it has room.
    """
    where = places(run, live)
    found: dict[str, list[Want]] = {}
    moving = _for_room(run, evidence, where, drained, awaits)
    for node, want in (*moving, *_lost(run, evidence, where)):
        found.setdefault(node, []).append(want)
    return {node: tuple(items) for node, items in found.items()}


def _for_room(
    run: Run, evidence: Evidence, where: Places, drained: Drained, awaits: bool
) -> Sequence[tuple[str, Want]]:
    """Return the copies that must come elsewhere before what is proposed finds room.

    A ring that has turned leaves on one node more of another step than the rule places there.
    None of it is more than the policy asks for, so a restore that needs its room would wait for
    ever. Once any node lacks room all of it is brought to where the rule places it, since where it
    comes there may be more of that kind; what is left behind is spare then.
    """
    attempt, decision = run.attempt, run.decision
    chosen = decision.checkpoint if decision and run.deciding else None
    if chosen is None or attempt is None or len(run.ranks) < attempt.spec.world_size:
        return ()
    moved = {
        host: [
            item
            for item in _misplaced(run, evidence, where, host, attempt.allowed.copies, chosen)
            if item.shard.id not in drained.get(host, ())
        ]
        for host in sorted(where.live)
    }
    if not any(moved.values()):
        return ()
    # What each host needs, and could spare, takes long to say: most restores have room for all.
    stored = evidence.sources.get(chosen, {}).values()
    whole_bytes = sum(item.shard.length_bytes for item in stored)
    tight = [host for host in moved if _left_bytes(where.live[host], ()) < whole_bytes]
    if not any(_lacks_room(run, evidence, where.live, host, ()) for host in tight):
        return ()
    spared = {
        host: spares(run, evidence, where.live, host, drained, awaits=awaits) for host in moved
    }
    if not any(_lacks_room(run, evidence, where.live, host, spared[host]) for host in moved):
        return ()
    found = {
        item.shard.id: _brought(run, item, where)
        for host, items in moved.items()
        for item in items
        if item.shard.id not in spared[host]
    }
    return [want for wants in found.values() for want in wants]


def _misplaced(
    run: Run, evidence: Evidence, where: Places, host: str, asked: Copies, chosen: CheckpointId
) -> Iterable[ShardCopies]:
    """Yield what ``host`` holds of other usable steps, and the rule places on other nodes.

    Newer ones, too: a user has asked for an older step, or nobody knows of them yet. Not of those
    that stay: a copy elsewhere would take room there, and make none here.
    """
    staying = _staying(run, chosen)
    for held in where.live[host].inventory.shards:
        key = held.shard.id.checkpoint
        item = evidence.live.get(key, {}).get(held.shard.id)
        if item is None or key in staying or not run.usable(key):
            continue
        if host not in where.placed(asked, item.owner):
            yield item


def _lacks_room(
    run: Run,
    evidence: Evidence,
    live: Mapping[str, Node],
    host: str,
    spared: Collection[ShardId],
) -> bool:
    """Tell whether what ``host`` must fetch for its ranks does not fit beside what it keeps."""
    missing = [want.shard.length_bytes for want in restores(run, evidence, live, host)]
    return bool(missing) and sum(missing) > _left_bytes(live[host], spared)


def _left_bytes(node: Node, spared: Collection[ShardId]) -> int:
    """Return what of a node's budget is left beside what it keeps."""
    kept = (
        held.shard.length_bytes
        for held in node.inventory.shards
        if held.state is HeldState.SEALED and held.shard.id not in spared
    )
    summed = (held.element.stripe.length_bytes for held in node.inventory.elements)
    return node.inventory.budget_bytes - sum(kept) - sum(summed)


def _brought(run: Run, item: ShardCopies, where: Places) -> Sequence[tuple[str, Want]]:
    fetchers = enumerate(_fetchers(run, item, where), item.shard.id.rank)
    return [(node, want_of(item, WantReason.REPAIR, turn)) for turn, node in fetchers]


def _lost(run: Run, evidence: Evidence, where: Places) -> Sequence[tuple[str, Want]]:
    if run.attempt is None or run.deciding:
        return ()
    found: list[tuple[str, Want]] = []
    for key in protected_checkpoints(run):
        for _, item in sorted(evidence.live.get(key, {}).items()):
            found.extend(_brought(run, item, where))
        for _, item in sorted(evidence.sources.get(key, {}).items()):
            if item.rebuilt is not None and not item.nodes:
                found.append(_rebuilt(run, item, item.rebuilt, where))
    return found


def _rebuilt(run: Run, item: ShardCopies, source: Rebuilt, where: Places) -> tuple[str, Want]:
    """Return who makes a shard again that nobody has: a node without another piece, if it can.

    That of its rank first, so that not one node makes all that were lost, for which it has no room.
    """
    number = item.shard.id.rank
    busy = {node for piece in source.pieces for node in piece.nodes}
    home = {rank.node for rank in run.ranks if rank.rank == number}
    nodes = sorted(where.ring, key=lambda node: (node in busy, node not in home, where.turns[node]))
    return nodes[0], want_of(item, WantReason.REPAIR, number)


def protected_checkpoints(run: Run) -> tuple[CheckpointId, ...]:
    """Return the checkpoints whose copies are made up: the newest, what was restored, the one kept.

    Where there is no room for both the newest lets the kept one go, once all its copies lie there;
    so does what was restored, for a newest one that has no room either.
    Its owners replicate the newest too, but ask once for each copy: one that a backup, or its
    owner, has replaced before it heard of the commit is nobody else's to bring back (ADR 0021).
    """
    newest_first = sorted((row.id for row in run.checkpoints), reverse=True)
    newest = next((key for key in newest_first if run.usable(key)), None)
    kept = free_before(run)
    named = (key for key in (newest, run.parent, kept) if key)
    return tuple(dict.fromkeys(key for key in named if kept is None or key >= kept))


def _fetchers(run: Run, item: ShardCopies, where: Places) -> tuple[str, ...]:
    """Return the nodes that should get a copy: where the rule places it, or what is missing.

    What lies elsewhere does not count while the owner lives: else one node is left with more than
    its share, and another, that came back empty, with room. Without it the next nodes of the ring
    get what is missing; with failure domains, none in one that has a copy.
    """
    attempt = run.attempt
    if attempt is None:
        return ()
    asked, domains = attempt.allowed.copies, where.domains
    if item.owner in where.live:
        placed = where.placed(asked, item.owner)
        return tuple(node for node in placed if node not in item.nodes)
    chosen: list[str] = []
    for node in where.ring:
        holders = [*item.nodes, *chosen]
        used = {asked.place(holder, domains) for holder in holders}
        if asked.missing(holders, domains) and asked.place(node, domains) not in used:
            chosen.append(node)
    return tuple(chosen)


def want_of(item: ShardCopies, reason: WantReason, turn: int, bad: _Bad = frozenset()) -> Want:
    """Return the want of a shard from all that serve it but the ``bad``, the object store last.

    Nodes are turned so that different fetchers begin with another one.
    """
    start = turn % max(1, len(item.nodes))
    nodes = map(Memory, (*item.nodes[start:], *item.nodes[:start]))
    good = [source for source in nodes if (item.shard.id, source) not in bad]
    sources: list[Source] = [*good[:NODES_PER_WANT_MAX]]
    if item.rebuilt and (item.shard.id, Rebuilt(item.rebuilt.stripe)) not in bad:
        sources.append(item.rebuilt)
    if item.object and (item.shard.id, Object()) not in bad:
        sources.append(Object())
    return Want(shard=item.shard, sources=tuple(sources), reason=reason, owner=item.owner)
