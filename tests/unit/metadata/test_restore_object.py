"""Restores from the object store: one more source, newest first over all tiers (F67, F68, F70)."""

from dataclasses import replace

import pytest

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.sources import Memory, Object
from holdfast_services.metadata.domain.believed_copies import gather, whole
from holdfast_services.metadata.domain.node_view import node_view

RULE = PersistRule(steps=10)


@pytest.fixture
def stored(cluster):
    """Step 10 is durable and in memory; the first attempt is still there."""
    cluster.object_tier()
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b", persist=RULE)
    cluster.commit(10, 1, "a", "b")
    cluster.finish(10, 1)
    return cluster


def again(cluster):
    """The next attempt begins on nodes as they are now."""
    cluster.launch(b"second", "a", "b", persist=RULE)


def wants(cluster, node):
    found = [w for w in cluster.view(node).wants if w.shard.id.step == 10]
    return {want.shard.id.rank: want.sources for want in found}


def lose(cluster, *names):
    for name in names:
        cluster.wipe(name)
        cluster.report(name)


def test_with_all_memory_lost_it_comes_from_the_object_store(stored):
    """F67, F74."""
    lose(stored, "a", "b")
    again(stored)

    assert ("PROPOSED", (10, 1)) == stored.decided()
    assert {0: (Object(),), 1: (Object(),)} == wants(stored, "a")
    assert 2 == len(stored.run.decision.shards)
    stored.ready(("a", 0), ("b", 1))
    assert ("CONFIRMED", (10, 1)) == stored.decided()
    assert {0: (Object(),), 1: (Object(),)} == wants(stored, "a"), "until it is loaded"


def test_shards_come_mixed_from_own_memory_peers_and_the_object_store(stored):
    """F67: each shard from the nearest that has it; a node is not asked for what it lacks."""
    lose(stored, "a")
    stored.drop("b", 10, 1, 0)
    stored.report("b")
    again(stored)

    assert ("PROPOSED", (10, 1)) == stored.decided()
    assert {0: (Object(),), 1: (Memory("b"), Object())} == wants(stored, "a")
    assert {0: (Object(),)} == wants(stored, "b")


def test_a_newer_step_in_memory_goes_before_an_older_durable_one(stored):
    """F68: newest over all tiers together."""
    stored.commit(15, 1, "a", "b")
    again(stored)

    assert ("PROPOSED", (15, 1)) == stored.decided()
    assert stored.view("a").wants == ()


def test_an_older_durable_step_is_taken_when_the_newest_in_memory_is_torn(stored):
    """F69."""
    stored.commit(15, 1, "a", "b")
    lose(stored, "a")
    stored.drop("b", 15, 1, 0)
    stored.report("b")
    again(stored)

    assert ("PROPOSED", (10, 1)) == stored.decided()


def test_copies_in_memory_that_are_not_what_the_manifest_says_are_no_sources(stored):
    """What is durable is what its manifest says."""
    lose(stored, "a")
    stored.hold("b", 10, 1, 0, owner="a", digest=b"x" * 16)
    stored.report("b")
    again(stored)

    assert ("PROPOSED", (10, 1)) == stored.decided()
    assert {bytes([0]) * 16, bytes([1]) * 16} == {
        shard.root_digest for shard in stored.run.decision.shards
    }
    assert {0: (Object(),), 1: (Memory("b"), Object())} == wants(stored, "a")
    assert {0: (Object(),)} == wants(stored, "b"), "its own copy is another thing"


def test_an_accused_object_is_not_asked_again_and_a_peer_is(stored):
    """F70: a source that served wrong bytes is out for this decision."""
    lose(stored, "a")
    again(stored)
    number = stored.run.decision.number
    stored.accuse("a", 10, 1, 0, Object(), number)
    stored.report("a")

    assert ("PROPOSED", (10, 1)) == stored.decided()
    assert (Memory("b"),) == wants(stored, "a")[0]
    assert (Memory("b"), Object()) == wants(stored, "a")[1]


def test_when_the_object_was_the_last_source_an_older_step_is_proposed(stored):
    """F69: step 20 is corrupt in the bucket, step 10 is whole."""
    stored.commit(20, 1, "a", "b")
    stored.finish(20, 1)
    lose(stored, "a", "b")
    again(stored)
    assert ("PROPOSED", (20, 1)) == stored.decided()
    stored.accuse("a", 20, 1, 0, Object(), stored.run.decision.number)
    stored.report("a")

    assert ("PROPOSED", (10, 1)) == stored.decided()
    stored.ready(("a", 0), ("b", 1))
    assert stored.run.superseded(stored.row(20, 1).id), "left behind, though durable"


def test_lost_only_when_no_tier_has_anything_and_the_reason_says_so(stored):
    """P4: an error that tells a person what was tried."""
    lose(stored, "a", "b")
    again(stored)
    for rank in (0, 1):
        stored.accuse("a", 10, 1, rank, Object(), stored.run.decision.number)
    stored.report("a")

    assert ("LOST", None) == stored.decided()
    assert "the object store did not deliver it either" in stored.run.decision.reason


def test_a_step_that_was_never_durable_is_lost_with_a_reason(cluster):
    cluster.object_tier()
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")
    cluster.commit(10, 1, "a", "b")
    lose(cluster, "a", "b")
    cluster.launch(b"second", "a", "b")

    assert ("LOST", None) == cluster.decided()
    assert "the object store does not have it" in cluster.run.decision.reason


def test_a_service_without_a_store_says_that_it_has_none(stored):
    stored.limits = type(stored.limits)(node_lease_s=5.0, decide_wait_s=10.0)
    lose(stored, "a", "b")
    again(stored)

    assert ("LOST", None) == stored.decided()
    assert "HOLDFAST_STORE" in stored.run.decision.reason


@pytest.mark.parametrize("changes", [{"expired": True}, {"bad": True}])
def test_what_is_expired_or_damaged_there_is_not_chosen(stored, changes):
    """G11, G20."""
    stored.commit(20, 1, "a", "b")
    stored.finish(20, 1)
    stored.change(20, 1, **changes)
    lose(stored, "a", "b")
    again(stored)

    assert ("PROPOSED", (10, 1)) == stored.decided()


def test_a_job_whose_every_checkpoint_was_removed_starts_anew(stored):
    """Expired by hand, all of them: that is not lost, that is wanted."""
    stored.change(10, 1, expired=True)
    lose(stored, "a", "b")
    again(stored)

    assert stored.run.decision.fresh


def test_a_superseded_durable_step_is_never_chosen(stored):
    """P2: step 20 of generation 1 was left behind by a restore of step 10."""
    stored.commit(20, 1, "a", "b")
    stored.finish(20, 1)
    for rank in (0, 1):
        stored.drop("a", 20, 1, rank)
        stored.drop("b", 20, 1, rank)
    stored.report("a", "b")
    again(stored)
    stored.accuse("a", 20, 1, 0, Object(), stored.run.decision.number)
    stored.report("a")
    stored.ready(("a", 0), ("b", 1))
    assert ("CONFIRMED", (10, 1)) == stored.decided()
    lose(stored, "a", "b")
    stored.launch(b"third", "a", "b", persist=RULE)

    assert ("PROPOSED", (10, 1)) == stored.decided()


def test_what_is_durable_does_not_end_the_wait_for_nodes_with_something_newer(stored):
    """F68: rank 1's node may bring step 15; only when all ranks are there is nothing newer."""
    stored.commit(15, 1, "a", "b")
    lose(stored, "a")
    node_b = stored.nodes.pop("b")
    stored.register(0, "a", nonce=b"second", persist=RULE)
    stored.report("a")
    assert "PENDING" == stored.decided()[0]
    stored.nodes["b"] = node_b
    stored.register(1, "b", nonce=b"second", persist=RULE)
    stored.report("b")

    assert ("PROPOSED", (15, 1)) == stored.decided()


def test_after_the_wait_is_over_the_durable_one_is_taken(stored):
    lose(stored, "a", "b")
    stored.register(0, "a", nonce=b"second", persist=RULE)
    stored.report("a")
    assert "PENDING" == stored.decided()[0]
    stored.later(10.0)

    assert ("PROPOSED", (10, 1)) == stored.decided()


def test_an_object_that_turns_bad_while_it_is_proposed_is_given_up(stored):
    lose(stored, "a", "b")
    again(stored)
    assert ("PROPOSED", (10, 1)) == stored.decided()
    stored.change(10, 1, bad=True)
    stored.report("a")

    assert ("LOST", None) == stored.decided()
    assert "damaged" in stored.run.decision.reason


def test_a_confirmed_restore_from_the_object_store_is_what_the_next_drains_name_as_parent(stored):
    lose(stored, "a", "b")
    again(stored)
    stored.ready(("a", 0), ("b", 1))
    stored.commit(20, 2, "a", "b")

    assert (10, 1) == (stored.row(20, 2).parent.step, stored.row(20, 2).parent.generation)
    assert [20] == stored.draining()
    assert node_view(stored.world(), "a").runs[0].pinned


def test_after_an_older_step_was_restored_later_multiples_come_again(stored):
    """G10: step 20 went to the object store before; what the new attempt makes of it goes too."""
    stored.commit(20, 1, "a", "b")
    stored.finish(20, 1)
    lose(stored, "a", "b")
    again(stored)
    stored.accuse("a", 20, 1, 0, Object(), stored.run.decision.number)
    stored.report("a")
    stored.ready(("a", 0), ("b", 1))
    stored.commit(19, 2, "a", "b")
    assert [] == stored.draining()
    stored.commit(20, 2, "a", "b")

    assert [20] == stored.draining()


def test_a_shard_that_lies_there_wrong_is_no_source_while_the_others_are(stored, checkpoint):
    """G20."""
    known = stored.objects[checkpoint(10, 1)]
    damaged = replace(known, bad=(known.shards[1].id,))
    copies = gather(known.checkpoint.run, (), 0.0, [damaged]).sources[known.checkpoint]

    assert [(Object(),), ()] == [copies[shard.id].sources for shard in known.shards]
    assert not whole(copies)


def test_a_durable_checkpoint_stands_after_any_number_of_restarts(stored):
    """P5, M7; defect A5: preempted forty times since it, then all memory goes."""
    for number in range(2, 42):
        stored.launch(b"%d" % number, "a", "b")
        stored.ready(("a", 0), ("b", 1))
        stored.commit(10 + number, number, "a", "b")
    for node in "ab":
        stored.wipe(node)
    stored.report("a", "b")

    stored.launch(b"the last", "a", "b")

    assert ("PROPOSED", (10, 1)) == stored.decided()
