"""What outlives the loss of nodes: P5 for those that the policy lets go, before any is lost."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from tests.simulation import checks
from tests.simulation.checks import Broken, age, name

from holdfast.core.ids import CheckpointId
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast_services.metadata.domain.model import Checkpoint, Run

if TYPE_CHECKING:
    from tests.simulation.ghosts import Ghosts


def p5_nodes_may_go(ghosts: Ghosts) -> None:
    """What was replicated, or a later one, outlives as many nodes as the policy lets go.

    Until something is lost: then fewer copies are there, and may be until they are made up.
    """
    key = ghosts.safe
    if key is not None and ghosts.in_line(key) and not _outlives(ghosts, key):
        raise Broken(f"P5: {name(key)} was replicated, and not all of it would be anywhere "
                     f"if {ghosts.losses} nodes were lost")  # fmt: skip


def is_safe(ghosts: Ghosts, row: Checkpoint) -> bool:
    """Tell whether a row that is acknowledged has all copies; older ones go in any case.

    With too few nodes it has fewer; and who told of one may have been lost a moment ago.
    """
    there = not ghosts.destroyed_count or _outlives(ghosts, row.id)
    return row.replicated_at_s is not None and there


def steps_given_up(ghosts: Ghosts, run: Run) -> set[tuple[int, int]]:
    """Return step and generation of each that is given up; 4.7: what is lost was there."""
    for step in run.abandoned:
        lost = re.fullmatch(r"the segment of rank (\d+) was lost", step.reason)
        key = CheckpointId(run.id, step.step, step.generation)  # type: ignore[arg-type]
        if lost and (key, int(lost[1])) not in ghosts.sealed_on:
            raise Broken(f"4.7: {step.reason} of {name(key)}, and it had sealed none")
    return {(step.step, step.generation) for step in run.abandoned}


def _outlives(ghosts: Ghosts, key: CheckpointId) -> bool:
    """Tell whether ``key`` or a later one is whole whichever ``losses`` nodes are lost."""
    later = (one for one in ghosts.committed | ghosts.proposed if age(one) > age(key))
    these = [key, *later]
    if any(ghosts.is_stored(one) for one in these if one in ghosts.manifests):
        return True
    lying = [_lying(ghosts, one) for one in these]
    return all(
        any(
            _is_whole(ghosts.world_sizes[one], pieces, gone)
            for one, pieces in zip(these, lying, strict=True)
        )
        for gone in combinations(ghosts.nodes, ghosts.losses)
    )


@dataclass
class _Lying:
    """Which nodes have each shard of a checkpoint intact, and each element of its stripes."""

    shards: dict[Shard, set[str]] = field(default_factory=lambda: defaultdict(set))
    elements: dict[Element, set[str]] = field(default_factory=lambda: defaultdict(set))


def _lying(ghosts: Ghosts, key: CheckpointId) -> _Lying:
    found = _Lying()
    for node in ghosts.nodes.values():
        for file in node.files.values():
            if file.shard is not None and file.shard.id.checkpoint == key and checks.good(file):
                found.shards[file.shard].add(node.name)
            held = file.element
            if held and held.element.stripe.checkpoint == key and checks.good_element(file):
                found.elements[held.element].add(node.name)
    return found


def _is_whole(world_size: int, lying: _Lying, gone: tuple[str, ...]) -> bool:
    """Tell whether each shard is there, or follows from its stripe, without the nodes ``gone``."""
    there = {shard for shard, nodes in lying.shards.items() if nodes.difference(gone)}
    found = {int(shard.id.rank) for shard in there}
    made: dict[Stripe, int] = defaultdict(int)
    for element, nodes in lying.elements.items():
        made[element.stripe] += bool(nodes.difference(gone))
    for stripe, count in made.items():
        if len(there.intersection(stripe.members)) + count >= len(stripe.members):
            found |= {int(shard.id.rank) for shard in stripe.members}
    return len(found) == world_size
