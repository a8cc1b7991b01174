"""Protection against the loss of nodes, as values: what lies where, and how far apart.

Rules ask a protection; none of them counts by itself. There are two kinds: whole copies in the
memory of other nodes, and parity over several shards. Pure. Units: bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from holdfast.core.placement import backups, place
from holdfast.core.stripes import element_nodes, groups, losses_survived

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

    @property
    def copies(self) -> Copies:
        """The whole copies that are asked for: these."""
        return self

    @property
    def incoming(self) -> str:
        """What a node holds for others, for people."""
        return "copies"

    @property
    def losses(self) -> int:
        """How many nodes, or domains, may be lost."""
        return self.n

    @property
    def places_min(self) -> int:
        """How many nodes, or domains, it takes."""
        return self.n + 1

    def __str__(self) -> str:
        """Name it for people."""
        return f"replicas={self.n}"

    def cut(self, losses: int) -> Copies:
        """Return what is left of it against at most so many losses."""
        return replace(self, n=min(self.n, losses))

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
        return self.cut(max(self._places_count(nodes, domains) - 1, 0))

    def _places_count(self, nodes: Iterable[str], domains: Domains) -> int:
        return len({place(node, domains) for node in nodes} if self.domain else set(nodes))

    def incoming_bytes(self, own_bytes: int, nodes_count: int, shards_count: int = 1) -> int:  # noqa: ARG002 - of parity alone
        """Return what a node holds for others when each of ``nodes_count`` owns ``own_bytes``."""
        return own_bytes * min(self.n, max(nodes_count - 1, 0))

    def left_bytes(self, missing_bytes: int, incoming_bytes: int) -> int:
        """Return what a node fetches to restore ``missing_bytes`` beside what it has of others."""
        return max(missing_bytes - incoming_bytes, 0)


@dataclass(frozen=True, slots=True)
class Parity:
    """``m`` elements for the shards of each ``k`` nodes: any ``m`` nodes may be lost.

    With ``domain``, the name of a kind of failure domain such as "rack", no two of a stripe's
    shards and elements lie in one domain, and any ``m`` domains may be lost; empty: in one node.
    With too few of them both numbers are cut, so that it costs each node no more.
    """

    k: int
    m: int
    domain: str = ""

    @property
    def copies(self) -> Copies:
        """The whole copies that are asked for: none."""
        return Copies(0, self.domain)

    @property
    def incoming(self) -> str:
        """What a node holds for others, for people."""
        return "parity elements"

    @property
    def losses(self) -> int:
        """How many nodes, or domains, may be lost."""
        return self.m

    @property
    def places_min(self) -> int:
        """How many nodes, or domains, it takes."""
        return self.k + self.m

    def __str__(self) -> str:
        """Name it for people."""
        return f"Parity({self.k}, {self.m})"

    def cut(self, losses: int) -> Parity:
        """Return what is left of it against at most so many losses: smaller groups, same price."""
        m = min(self.m, losses)
        return replace(self, k=-(-m * self.k // self.m) if m else self.k, m=m)

    def place(self, node: str, domains: Domains) -> str:
        """Return what is lost together with ``node``."""
        return self.copies.place(node, domains)

    def met(self, holders: Collection[str], domains: Domains) -> bool:
        """Tell whether a shard has so many whole copies that it needs no elements."""
        return Copies(self.m, self.domain).met(holders, domains)

    def within(self, nodes: Iterable[str], domains: Domains) -> Parity:
        """Return what of this protection there is room for on ``nodes``."""
        places_count = len({self.place(node, domains) for node in nodes})
        if places_count >= self.places_min:
            return self
        fitting = (self.cut(losses) for losses in range(self.m - 1, 0, -1))
        return next((one for one in fitting if one.places_min <= places_count), self.cut(0))

    def groups(
        self, nodes: Sequence[str], ring: Sequence[str], domains: Domains, *, turn: int
    ) -> tuple[tuple[str, ...], ...]:
        """Return which of ``nodes`` are summed up together; see ``stripes.groups``."""
        apart = domains if self.domain else None
        return groups(nodes, ring, size=self.k, elements=self.m, turn=turn, domains=apart)

    def element_nodes(
        self, members: Sequence[str], ring: Sequence[str], domains: Domains
    ) -> tuple[str, ...]:
        """Return the nodes that should hold a stripe's elements; see ``stripes.element_nodes``."""
        apart = domains if self.domain else None
        return element_nodes(members, ring, elements=self.m, domains=apart)

    def losses_survived(
        self, pieces: Sequence[Collection[str]], members_count: int, domains: Domains
    ) -> int:
        """Return how many losses a stripe survives; see ``stripes.losses_survived``."""
        return losses_survived(pieces, members_count, domains if self.domain else None)

    def incoming_bytes(self, own_bytes: int, nodes_count: int, shards_count: int = 1) -> int:
        """Return what a node holds for others when each of ``nodes_count`` owns ``own_bytes``.

        ``shards_count``: in as many shards of one length. It is what the node with most elements
        has, also when some of the nodes are lost.
        """
        each = -(-own_bytes // max(shards_count, 1))
        return each * _elements_max(self.k, self.m, nodes_count, max(shards_count, 1))

    def left_bytes(self, missing_bytes: int, incoming_bytes: int) -> int:  # noqa: ARG002
        """Return what a node fetches to restore ``missing_bytes``: all, elements are no shards."""
        return missing_bytes


Protection = Copies | Parity

NO_COPIES = Copies()
"""A shard lies with its owner alone."""

_GROUPS = 2
"""With more than so many groups no node gets more than with some number below."""


@cache
def _elements_max(k: int, m: int, nodes_count: int, shards_count: int) -> int:
    """Return the most elements that a node with ranks gets, of any number of nodes up to this."""
    asked, most = Parity(k, m), 0
    smaller = [asked.cut(losses).places_min for losses in range(1, m + 1)]
    for count in range(1, min(nodes_count, _GROUPS * (k + m)) + 1):
        # Nodes without ranks hold elements too: with them there is room for a larger parity.
        with_spares = [places for places in smaller if count < places <= nodes_count]
        for places in (count, *with_spares):
            ring = tuple(map(str, range(places)))
            nodes = ring[:count]
            allowed = asked.within(ring, {})
            held = Counter[str]()
            for turn in range(shards_count):
                for group in allowed.groups(nodes, ring, {}, turn=turn):
                    held.update(allowed.element_nodes(group, ring, {}))
            most = max(most, *(held[node] for node in nodes))
    return most
