"""A rank finds after the restore was confirmed that it needs more, and that this is bad."""

import pytest
from tests.unit.metadata.test_needed_shards import name

from holdfast.core.needs import Needs
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.sources import Object

RULE = PersistRule(steps=10)
NODES = ("a", "b", "c")


@pytest.fixture
def loading(cluster):
    """Step 20 is confirmed for two ranks that need their own shards; nobody needs that of rank 2.

    Steps 10 and 20 lie in the store alone.
    """
    cluster.object_tier()
    cluster.join(*NODES)
    cluster.launch(b"first", *NODES, persist=RULE)
    for step in (10, 20):
        cluster.commit(step, 1, *NODES)
        cluster.finish(step, 1, world=3)
    for node in NODES:
        cluster.wipe(node)
        cluster.report(node)
    return attempt(cluster, b"second", 20)


def attempt(cluster, nonce, step):
    cluster.launch(nonce, "a", "b", persist=RULE)
    assert cluster.decided() == ("PROPOSED", (step, 1))
    key = cluster.run.decision.checkpoint
    for rank, node in enumerate("ab"):
        name(cluster, node, rank, key, rank)
        cluster.hold(node, step, 1, rank, world=3)
    cluster.ready(("a", 0), ("b", 1))
    assert cluster.decided() == ("CONFIRMED", (step, 1))
    return cluster


def widen(cluster):
    """Rank 1 needs all of it, and the object of rank 2 turns out bad."""
    decision = cluster.run.decision
    cluster.status("b", 1, needs=Needs(checkpoint=decision.checkpoint, whole=True, number=2))
    cluster.report("b")
    assert 2 in [want.shard.id.rank for want in cluster.view("b").wants]
    cluster.accuse("b", decision.checkpoint.step, 1, 2, Object(), decision.number)
    cluster.report("b")


def begins(cluster):
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, loaded=True)
        cluster.report(node)


def test_a_step_that_could_not_be_loaded_is_not_chosen_by_the_next_attempt(loading):
    """P5: it was proposed, confirmed and died of again, for ever."""
    confirmed = loading.run.decision
    widen(loading)
    assert loading.run.decision == confirmed
    assert loading.kinds()[-1] == "restore_failed"

    attempt(loading, b"third", 10)

    assert loading.run.superseded(loading.row(20, 1).id)


def test_what_was_tried_in_vain_frees_nothing_that_is_older(loading, checkpoint):
    loading.change(10, 1, copied_at_s=1.0)
    loading.change(20, 1, copied_at_s=2.0)
    assert loading.view("a").runs[0].free_before == checkpoint(20, 1)

    widen(loading)

    assert loading.view("a").runs[0].free_before == checkpoint(10, 1)


def test_without_an_older_step_the_next_attempt_is_lost_and_the_one_after_tries_again(loading):
    """A bad copy may be mended meanwhile: nothing is given up for good."""
    loading.change(10, 1, expired=True)
    widen(loading)
    loading.launch(b"third", "a", "b", persist=RULE)
    assert loading.decided() == ("LOST", None)
    reason = loading.run.decision.reason
    assert "has a copy of every shard, but no node delivers them intact" in reason

    attempt(loading, b"fourth", 20)


def test_a_step_that_came_after_all_is_chosen_again(loading):
    """P5: the ranks went on with it, so the next attempt does too."""
    widen(loading)
    begins(loading)

    attempt(loading, b"third", 20)


def test_what_a_rank_can_have_from_elsewhere_is_not_tried_in_vain(loading):
    loading.hold("c", 20, 1, 2, world=3)
    loading.report("c")

    widen(loading)

    assert "restore_failed" not in loading.kinds()
    attempt(loading, b"third", 20)
