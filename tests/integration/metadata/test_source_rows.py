"""A catalogue reads what an agent of protocol 2 has told it, before and beside the upgrade."""

import pytest
from sqlalchemy import text
from tests.said import tcp

from holdfast.core.ids import ShardId
from holdfast.core.inventory import BadSource, HeldState, Inventory, Peer
from holdfast.core.sources import Object
from holdfast_services.kit.db import make_engine, read_transaction, write_transaction
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache

# An inventory as protocol 2 encoded it: one shard, for which it blames b and the object store.
INVENTORY = bytes.fromhex(
    "0a0d0a01611203613a311a03613a321005180932310a280a080a0272311007180312036f6c64180222017028643210"
    "6464646464646464646464646464646410011a016120014a0f0a080a0272311007180312016218044a150a080a0272"
    "31100718031207406f626a6563741804"
)
KEY = ShardId("r1", 7, 3, 0)


@pytest.fixture
def engine(database_url):
    made = make_engine(database_url, connections_max=1)
    upgrade(made)
    with write_transaction(made) as connection:
        connection.execute(
            text(
                "INSERT INTO nodes (name, incarnation, sequence, reported_at_s, lease_until_s, "
                "lost, inventory) VALUES ('a', 5, 9, 3, 9, false, :inventory)"
            ),
            {"inventory": INVENTORY},
        )
    yield made
    made.dispose()


def nodes(engine):
    with read_transaction(engine) as connection:
        return Catalogue(connection, DecodeCache()).nodes()


def test_an_inventory_of_protocol_2_is_read_without_whom_it_blamed_and_where_it_served(engine):
    """Its agent is refused until it is upgraded; then it says anew what it finds."""
    inventory = nodes(engine)["a"].inventory

    assert [(KEY, HeldState.SEALED)] == [(h.shard.id, h.state) for h in inventory.shards]
    assert () == inventory.bad_sources
    peer = inventory.node
    assert ("a", "a:1", ()) == (peer.node, peer.rpc_address, peer.endpoints)


def test_whom_an_agent_of_this_protocol_blames_is_read_back(engine):
    bad = BadSource(shard=KEY, source=Object(), decision=4)
    peer = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
    told = Inventory(node=peer, incarnation=1, sequence=1, bad_sources=(bad,))
    with write_transaction(engine) as connection:
        Catalogue(connection, DecodeCache()).put_inventory(told, 3.0, 9.0)

    assert told == nodes(engine)["b"].inventory
