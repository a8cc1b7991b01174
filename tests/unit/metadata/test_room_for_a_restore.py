"""What must come elsewhere before a restore that is proposed has room (P5, P8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.metadata.conftest import RUN

from holdfast.core.decision import Start
from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import WantReason

SEGMENT = 100
OWNERS = "acb"
"""Of ranks 0, 1 and 2 in the first attempt; in the second they are on b, a and c."""


def save(cluster, step, *, at, owners=OWNERS):
    """``at``: the nodes that hold the shard of each rank."""
    for rank, nodes in enumerate(at):
        for node in nodes:
            cluster.hold(node, step, 1, rank, owner=owners[rank], world=3)
    cluster.report(*owners)


@pytest.fixture
def turned(cluster):
    """20 is proposed: c needs a shard more and has room for none; three of its five are of 10.

    The ring turned: what b owns stood on c by a ring between, and comes on a now, which is empty.
    """
    cluster.join(*"abc")
    for machine in cluster.machines.values():
        machine.budget_bytes = 5 * SEGMENT
    cluster.launch(b"first", *OWNERS)
    save(cluster, 10, at=("ac", "cb", "bac"))
    save(cluster, 20, at=("ac", "cb", "b"))
    assert cluster.levels() == {(10, 1): "replicated", (20, 1): "local"}
    cluster.wipe("a")
    cluster.report("a")
    cluster.launch(b"second", *"bac")
    assert cluster.decided() == ("PROPOSED", (20, 1))
    return cluster


def brought(cluster):
    """Return (node, step, rank) of all copies that are to be made up."""
    return {
        (node, int(want.shard.id.step), int(want.shard.id.rank))
        for node in "abc"
        for want in cluster.view(node).wants
        if want.reason is WantReason.REPAIR
    }


def spares(cluster):
    return {
        (node, int(key.step), int(key.rank)) for node in "abc" for key in cluster.view(node).spares
    }


def test_what_takes_the_room_of_a_proposed_restore_comes_to_where_the_rule_places_it(turned):
    """P5: nothing that c has may go, it has all of 10 should b be lost; so it waited for ever."""
    assert set() == spares(turned)
    assert {("a", 10, 2)} == brought(turned)

    turned.hold("a", 10, 1, 2, owner="b", world=3)
    turned.report("a")

    assert {("c", 10, 2)} == spares(turned)
    assert set() == brought(turned), "c has room once it gives that back"


def test_nothing_moves_while_a_restore_is_proposed_and_has_room(turned):
    """A usual restart has the network to itself, however the ring has turned."""
    turned.machines["c"].budget_bytes += SEGMENT
    turned.report("c")

    assert set() == brought(turned)


def test_nothing_moves_for_a_node_that_needs_nothing_more(turned):
    turned.hold("c", 20, 1, 2, owner="b", world=3)
    turned.report("c")

    assert set() == brought(turned)


def test_what_stands_where_the_rule_places_it_stays(turned):
    """Its copies make no room there: of a step that may be gone back to they are kept."""
    turned.drop("c", 10, 1, 2)
    turned.machines["c"].budget_bytes -= SEGMENT
    turned.report("c")

    assert set() == brought(turned)


def test_what_is_pinned_is_brought_nowhere(turned):
    """No copy of it is given back, so that would take a's room and make none on c."""
    turned.run = replace(turned.run, pins=(*turned.run.pins, CheckpointId(RUN, 10, 1)))

    assert set() == brought(turned)


def test_nothing_moves_before_all_ranks_are_there(turned):
    """The ring is not known until then."""
    turned.register(0, "b", nonce=b"third", world=3)
    turned.register(1, "a", nonce=b"third", world=3)
    for node in "abc":
        turned.report(node)
    assert turned.decided() == ("PROPOSED", (20, 1))
    assert set() == brought(turned)

    turned.register(2, "c", nonce=b"third", world=3)
    turned.report("c")
    assert {("a", 10, 2)} == brought(turned)


def test_a_spare_is_given_back_and_not_brought_anywhere(turned):
    """10 is acknowledged: what is older would have gone already."""
    turned.drop("c", 10, 1, 2)
    for rank in range(3):
        turned.hold("c", 5, 1, rank, owner=OWNERS[rank], world=3)
    turned.report("c")

    assert {("c", 5, 0), ("c", 5, 1), ("c", 5, 2)} <= spares(turned)
    assert set() == brought(turned)


def go_back(cluster, owners, *, of_10, of_20):
    """Save 10 and 20 on ``owners``, then go back to 10 with the ranks on a, b and c."""
    cluster.join(*"abc")
    for machine in cluster.machines.values():
        machine.budget_bytes = 5 * SEGMENT
    cluster.launch(b"first", *owners)
    save(cluster, 10, at=of_10, owners=owners)
    save(cluster, 20, at=of_20, owners=owners)
    cluster.launch(b"second", *"abc", start=Start(name="back", step=10))
    assert cluster.decided() == ("PROPOSED", (10, 1))


def test_what_is_newer_than_the_proposed_step_comes_to_where_the_rule_places_it_too(cluster):
    """P5: the user goes back to 10, and may yet go back to 20: a lacks a shard, c has room."""
    go_back(cluster, "cba", of_10=("bc", "abc", "abc"), of_20=("ac", "ab", "ab"))

    assert {("c", 20, 1)} == brought(cluster)

    cluster.hold("c", 20, 1, 1, owner="b", world=3)
    cluster.report("c")
    assert ("a", 20, 1) in spares(cluster)


def test_where_a_copy_comes_what_belongs_elsewhere_gives_its_room(cluster):
    """P5: c lacks a shard; what is too much there belongs on b, where another belongs on a."""
    go_back(cluster, "bac", of_10=("abc", "abc", "ab"), of_20=("bc", "ac", "bc"))

    assert {("b", 20, 1), ("a", 20, 2)} == brought(cluster)
