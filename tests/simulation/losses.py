"""What outlives the loss of nodes: P5 for those that the policy lets go, before any is lost."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from tests.simulation import checks
from tests.simulation.checks import Broken, age, name

from holdfast.core.ids import CheckpointId
from holdfast_services.metadata.domain.model import Checkpoint

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


def _outlives(ghosts: Ghosts, key: CheckpointId) -> bool:
    """Tell whether ``key`` or a later one is whole whichever ``losses`` nodes are lost."""
    later = (one for one in ghosts.committed | ghosts.proposed if age(one) > age(key))
    these = [key, *later]
    if any(ghosts.is_stored(one) for one in these if one in ghosts.manifests):
        return True
    holders = [_holders(ghosts, one) for one in these]
    return all(
        any(all(nodes - {*gone} for nodes in of_ranks) for of_ranks in holders)
        for gone in combinations(ghosts.nodes, ghosts.losses)
    )


def _holders(ghosts: Ghosts, key: CheckpointId) -> list[set[str]]:
    """Return, by rank, the nodes that have its shard intact."""
    found: list[set[str]] = [set() for _ in range(ghosts.world_sizes[key])]
    for node in ghosts.nodes.values():
        for file in node.files.values():
            shard = file.shard
            if shard is not None and shard.id.checkpoint == key and checks.good(file):
                found[int(shard.id.rank)].add(node.name)
    return found
