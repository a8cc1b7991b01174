"""What no agent of ours sends is refused before any rule reckons with it (P9)."""

from dataclasses import replace

import pytest

from holdfast.core.inventory import Endpoint
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain.inventory_limits import (
    ENDPOINTS_PER_NODE_MAX,
    PEER_TEXT_LENGTH_MAX,
    received,
)

LONG = "x" * (PEER_TEXT_LENGTH_MAX + 1)
ONE = Endpoint(kind="tcp", address="a:2")


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoints": (ONE,) * (ENDPOINTS_PER_NODE_MAX + 1)},
        {"endpoints": (replace(ONE, kind=LONG),)},
        {"endpoints": (ONE, replace(ONE, address=LONG))},
        {"endpoints": (replace(ONE, address="a\0:2"),)},
        {"rpc_address": LONG},
        {"domain": LONG},
        {"node": "no/name"},
    ],
    ids=["count", "kind", "address", "nul", "rpc address", "domain", "name"],
)
def test_a_peer_that_would_burden_everybody_is_refused(cluster, changes):
    """Each node is told of each other."""
    cluster.join("a")
    inventory = cluster.inventory("a")

    with pytest.raises(InvalidRequestError, match=r"at most|not usable"):
        received(replace(inventory, node=replace(inventory.node, **changes)))


def test_a_peer_at_the_limits_is_taken(cluster):
    cluster.join("a")
    inventory = cluster.inventory("a")
    longest = Endpoint(kind="k" * PEER_TEXT_LENGTH_MAX, address="a" * PEER_TEXT_LENGTH_MAX)
    peer = replace(inventory.node, endpoints=(longest,) * ENDPOINTS_PER_NODE_MAX)

    assert received(replace(inventory, node=peer)).node == peer
