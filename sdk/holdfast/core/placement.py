"""The placement rule: which nodes hold the copies of a node's shards.

Pure, and the same on every node: the owner uses it to name its backups, metadata to see which
copies are missing. Source: the ring of the architecture, section 4.5; F52.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def ring(rank_nodes: Mapping[int, str], live: Sequence[str]) -> tuple[str, ...]:
    """Return nodes in placement order: those of the ranks by lowest rank, then the spare ones.

    Args:
        rank_nodes: rank -> node of the attempt.
        live: nodes with a valid lease; others are left out.
    """
    by_rank = dict.fromkeys(rank_nodes[rank] for rank in sorted(rank_nodes))
    alive = set(live)
    members = [node for node in by_rank if node in alive]
    return (*members, *sorted(alive.difference(members)))


def backups(
    owner: str,
    nodes: Sequence[str],
    *,
    replicas: int,
    domains: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the nodes that hold a copy of ``owner``'s shards, at most ``replicas``.

    Walks the ring from the node after the owner. With ``domains``, every copy and the owner lie
    in different failure domains; fewer come back when there are not enough nodes or domains. An
    owner that is no longer in the ring counts as standing before its first node.

    Args:
        owner: Node whose shards are to be copied.
        nodes: The ring, see ``ring``.
        replicas: Copies beside the owner's, >= 0.
        domains: node -> failure domain, or None when every node is its own.
    """
    start = nodes.index(owner) + 1 if owner in nodes else 0
    walk = [*nodes[start:], *nodes[:start]]
    chosen: list[str] = []
    used = {place(owner, domains)}
    for node in walk:
        if len(chosen) >= replicas:
            break
        if node == owner or place(node, domains) in used:
            continue
        chosen.append(node)
        used.add(place(node, domains))
    return tuple(chosen)


def place(node: str, domains: Mapping[str, str] | None) -> str:
    """Return what is lost together with ``node``: its failure domain, or the node by itself."""
    named = domains.get(node) if domains else None
    return f"domain:{named}" if named else f"node:{node}"
