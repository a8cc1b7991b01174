"""Which elements of parity nothing needs, so that their holders may give them back for room.

Deterministic: all nodes may give back at once what they are told of. So copies that are given
back too do not count here, and of stripes over the same shards the same are kept for everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.protection import Domains, Parity
from holdfast.core.stripes import Element
from holdfast_services.metadata.domain.believed_copies import (
    CheckpointCopies,
    Evidence,
    holders_in,
    whole,
)
from holdfast_services.metadata.domain.copies_to_fetch import (
    SPARES_IN_VIEW_MAX,
    Keeping,
    given_up,
)
from holdfast_services.metadata.domain.held_stripes import HeldStripe
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.domain.shortage import spread


def spare_elements(
    run: Run, evidence: Evidence, live: Mapping[str, Node], host: str, *, awaits: bool
) -> Sequence[str]:
    """Return the keys of elements on ``host`` that nothing needs, in the order to drop them.

    First those without which their checkpoint is as safe, then those of checkpoints that are given
    back themselves (``copies_to_fetch.spares``).
    """
    node, attempt = live.get(host), run.attempt
    mine = [h.element for h in node.inventory.elements] if node is not None else []
    mine = [element for element in mine if element.stripe.checkpoint.run == run.id]
    if attempt is None or not mine:
        return ()
    gone, staying = given_up(run, evidence, live, awaits=awaits)
    if staying is None:
        return ()
    keeping = Keeping(run, evidence, live, attempt.allowed)
    needed: dict[CheckpointId, Collection[Element] | None] = {}
    needless: list[str] = []
    old: list[str] = []
    for element in mine:
        key = element.stripe.checkpoint
        if key in staying:
            continue
        if gone(key):
            old.append(element.key)
            continue
        if key not in needed:
            needed[key] = _needed(keeping, evidence, key, host)
        kept = needed[key]
        if kept is not None and element not in kept:
            needless.append(element.key)
    return (*needless, *old)[:SPARES_IN_VIEW_MAX]


def _needed(
    keeping: Keeping, evidence: Evidence, key: CheckpointId, host: str
) -> Collection[Element] | None:
    """Return the elements that ``host`` keeps of a checkpoint; None: it is not safe, so all."""
    stripes, copies = evidence.stripes.get(key, ()), keeping.kept(key)
    domains, asked = keeping.where.domains, keeping.asked
    if not whole(copies) or not spread(asked, copies, domains, stripes):
        return None
    if not isinstance(asked, Parity):
        return ()
    return {
        Element(stripe=held.stripe, number=piece.number)
        for held in _kept(asked, copies, domains, stripes)
        for piece in _least(asked, copies, domains, held).elements
        if host in piece.nodes
    }


def _kept(
    asked: Parity, copies: CheckpointCopies, domains: Domains, stripes: Iterable[HeldStripe]
) -> Sequence[HeldStripe]:
    """Return stripes that protect what copies do not; of several over a shard small ones go."""
    holders = holders_in(copies)
    safe = [held for held in stripes if held.survives(asked, holders, domains)]
    bare = {key for key, item in copies.items() if not asked.met(item.nodes, domains)}
    times = Counter(key for held in safe for key in _members(held, bare))
    kept = []
    for held in sorted(safe, key=lambda held: (len(held.stripe.members), held.stripe.key)):
        members = _members(held, bare)
        if all(times[key] > 1 for key in members):
            times.subtract(members)
        else:
            kept.append(held)
    return kept


def _members(held: HeldStripe, bare: Collection[ShardId]) -> Sequence[ShardId]:
    return [shard.id for shard in held.stripe.members if shard.id in bare]


def _least(
    asked: Parity, copies: CheckpointCopies, domains: Domains, held: HeldStripe
) -> HeldStripe:
    """Return the stripe without elements that it is as safe without: one lies twice, or badly."""
    holders = holders_in(copies)
    losses = held.losses(asked, holders, domains)
    for piece in held.elements:
        for node in piece.nodes:
            fewer = held.without(piece.number, node)
            if fewer.losses(asked, holders, domains) >= losses:
                held = fewer
    return held
