"""Protection against the loss of nodes, as values: how many copies, and how far apart.

Rules ask a protection; none of them counts copies itself. Today there is one kind, whole copies
in the memory of other nodes. A kind to come (parity over several shards) answers the same
questions. Pure. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.placement import backups, place

Domains = Mapping[str, str]
"""Node -> failure domain; one that is not named, or empty, is the node by itself."""


@dataclass(frozen=True, slots=True)
class Copies:
    """``n`` whole copies of each shard beside its owner's.

    With ``domain``, the name of a kind of failure domain such as "rack", no two of them nor the
    owner lie in one domain; empty: in one node.
    """

    n: int = 0
    domain: str = ""

    def targets(self, owner: str, ring: Sequence[str], domains: Domains) -> tuple[str, ...]:
        """Return the nodes that should hold ``owner``'s shards beside it, by the placement rule.

        Fewer than ``n`` come back when there are not enough nodes, or domains.
        """
        return backups(owner, ring, replicas=self.n, domains=domains if self.domain else None)

    def place(self, node: str, domains: Domains) -> str:
        """Return what is lost together with ``node``."""
        return place(node, domains) if self.domain else node

    def met(self, holders: Collection[str], domains: Domains) -> bool:
        """Tell whether a shard that ``holders`` have, each named once, is protected.

        Asked for each shard with each report: without domains it only counts.
        """
        if len(holders) <= self.n:
            return False
        return not self.domain or self._places_count(holders, domains) > self.n

    def missing(self, holders: Iterable[str], domains: Domains) -> int:
        """Return how many more holders a shard needs, each in another place."""
        return max(1 + self.n - self._places_count(holders, domains), 0)

    def within(self, nodes: Iterable[str], domains: Domains) -> Copies:
        """Return what of this protection there is room for on ``nodes``, the owner's included."""
        return replace(self, n=max(min(self.n, self._places_count(nodes, domains) - 1), 0))

    def _places_count(self, nodes: Iterable[str], domains: Domains) -> int:
        return len({place(node, domains) for node in nodes} if self.domain else set(nodes))

    def incoming_bytes(self, own_bytes: int, nodes_count: int) -> int:
        """Return what a node holds for others when each of ``nodes_count`` owns ``own_bytes``."""
        return own_bytes * min(self.n, max(nodes_count - 1, 0))


NO_COPIES = Copies()
"""A shard lies with its owner alone."""
