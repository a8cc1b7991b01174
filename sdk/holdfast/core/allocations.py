"""Who takes part in the rounds of a launch, where somebody else than its launchers decides it.

An allocation is a level: whole, and of two the one with the higher number counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.ids import node_name
from holdfast.core.rounds import NODES_MAX, RANKS_PER_NODE_MAX
from holdfast.errors import InvalidRequestError

DEVICE_MAX = 100_000
NUMBER_MAX = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a launch has of one node: so many ranks, on these devices; empty: on whichever."""

    node: str
    ranks: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """All that a launch has; no shares: nobody takes part, and ranks are to save and end.

    ``ranks_min``: with so many it goes on if nodes are lost, before somebody decides anew; 0: it
    waits.
    """

    number: int
    ranks_min: int = 0
    shares: tuple[Share, ...] = ()

    def share(self, node: str) -> Share | None:
        """Return what the launch has of a node."""
        return next((one for one in self.shares if one.node == node), None)

    def ranks_of(self, nodes: Iterable[str]) -> int:
        """Return how many ranks these nodes have of it."""
        shares = (self.share(node) for node in set(nodes))
        return sum(one.ranks for one in shares if one is not None)


def check(allocation: Allocation) -> None:
    """Refuse an allocation whose names or numbers make no sense.

    Raises:
        InvalidRequestError: names what is wrong.
    """
    if not 1 <= allocation.number <= NUMBER_MAX:
        raise InvalidRequestError(f"number {allocation.number} is not within 1..{NUMBER_MAX}")
    if allocation.ranks_min < 0:
        raise InvalidRequestError(f"ranks_min {allocation.ranks_min} is negative")
    if len(allocation.shares) > NODES_MAX:
        raise InvalidRequestError(f"{len(allocation.shares)} nodes are more than {NODES_MAX}")
    if len({one.node for one in allocation.shares}) < len(allocation.shares):
        raise InvalidRequestError("a node has two shares")
    for share in allocation.shares:
        node_name(share.node)
        if not 1 <= share.ranks <= RANKS_PER_NODE_MAX:
            raise InvalidRequestError(
                f"node {share.node}: {share.ranks} ranks are not within 1..{RANKS_PER_NODE_MAX}"
            )
        if share.devices and len(set(share.devices)) != share.ranks:
            raise InvalidRequestError(
                f"node {share.node} has {share.ranks} ranks and {len(set(share.devices))} devices"
            )
        if any(not 0 <= device <= DEVICE_MAX for device in share.devices):
            raise InvalidRequestError(f"node {share.node}: a device is not within 0..{DEVICE_MAX}")
