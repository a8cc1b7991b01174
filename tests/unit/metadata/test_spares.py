"""Copies that are more than the policy asks for: nodes are told which of theirs these are (P8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.metadata.conftest import JOB, RUN

from holdfast.core.decision import DecisionState
from holdfast.core.node_view import SupersedeRule
from holdfast.core.persistence_rules import PersistRule
from holdfast_services.metadata.domain import copies_to_fetch
from holdfast_services.metadata.domain.model import Run

NODES = "dcab"
"""As they stand in the ring: first those of the ranks, so not as in the alphabet."""


@pytest.fixture
def copied(cluster):
    """Step 10 of ranks on d and c lies there twice; a and b are empty."""
    cluster.join(*NODES)
    cluster.launch(b"first", "d", "c")
    cluster.commit(10, 1, "d", "c")
    return cluster


def copy(cluster, node, rank, **fields):
    cluster.hold(node, 10, 1, rank, owner="dc"[rank], **fields)
    cluster.report(node)


def spares(cluster):
    """Return (node, rank) of all copies that are said to be spare."""
    return {(node, key.rank) for node in NODES for key in cluster.view(node).spares}


def test_a_copy_more_than_the_policy_asks_for_is_spare_and_never_where_the_rule_places_it(copied):
    """P8: what a node must keep is within its sum, whoever else has fetched it."""
    assert set() == spares(copied)
    for node in "ab":
        copy(copied, node, 0)
    copy(copied, "a", 1)

    assert {("a", 0), ("b", 0), ("d", 1)} == spares(copied), "after c comes a"


def test_a_second_copy_in_a_domain_is_spare_though_a_third_domain_is_asked_for(cluster):
    """P5, P8: what a restore has brought beside it would keep that one's room for ever."""
    for node, domain in zip(NODES, "xxyy", strict=True):
        cluster.machine(node, domain)
    cluster.join(*NODES)
    cluster.launch(b"first", "d", "c", replicas=2, replica_domain="rack")
    cluster.commit(10, 1, "d", "c")
    for node in "ab":
        copy(cluster, node, 0)
    assert {("b", 0), ("c", 0)} == spares(cluster)

    cluster.machine("e", "z")
    cluster.join("e")
    assert {("b", 0)} == spares(cluster), "c has the third until e has"


def test_a_copy_is_not_spare_while_one_that_should_be_there_is_gone_or_bad(copied):
    """P5: as many as are asked for lie intact on nodes that live; the next of the ring keep it."""
    for node in "ab":
        copy(copied, node, 0)
    copy(copied, "c", 0, state=2)
    assert {("b", 0)} == spares(copied)

    copied.machines["d"].leaving = True
    copied.report("d")

    assert set() == spares(copied)


def test_nothing_is_spare_of_what_is_restored_until_all_ranks_have_loaded(copied):
    """4.8: of the checkpoint that is chosen every rank wants each shard on its node."""
    second = copied.launch(b"second", "b", "a")
    for node in "ab":
        for rank in (0, 1):
            copy(copied, node, rank)
    assert copied.decided() == ("PROPOSED", (10, 1))
    assert set() == spares(copied)
    copied.ready(("b", 0), ("a", 1))
    assert copied.decided() == ("CONFIRMED", (10, 1))
    copied.status("b", 0, loaded=True)
    copied.report("b")
    assert set() == spares(copied)
    copied.run = replace(copied.run, pins=())
    assert set() == spares(copied), "as a catalogue that was lost is told of the restore"

    copied.status("a", 1, loaded=True, generation=second)
    copied.report("a")

    assert {("a", 0), ("c", 0), ("a", 1), ("b", 1)} == spares(copied)


def test_of_what_is_not_restored_copies_are_spare_meanwhile(copied):
    """P8: room is wanted just then."""
    copy(copied, "a", 0)
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
    copied.report("d", "c")
    copied.launch(b"second", "d", "c")

    assert copied.decided() == ("PROPOSED", (20, 1))
    assert {("a", 0)} == spares(copied)


def test_what_is_older_than_the_acknowledged_step_is_spare_while_a_restore_goes_on(cluster):
    """P8: it would have gone by now, and took the restore's room."""
    cluster.join(*NODES)
    cluster.launch(b"first", "d", "c")
    for step in (10, 20):
        cluster.commit(step, 1, "d", "c")
    assert set() == spares(cluster), "its agents let it go by free_before"

    cluster.launch(b"second", "d", "c")

    assert cluster.decided() == ("PROPOSED", (20, 1))
    assert {("d", 0), ("d", 1), ("c", 0), ("c", 1)} == spares(cluster)


def test_a_catalogue_that_knows_of_none_goes_by_the_step_that_lies_as_the_policy_asks(copied):
    """P5, P8: it was lost, and what the last one had acknowledged made older ones spare."""
    for rank, node in enumerate("dc"):
        copied.hold(node, 15, 1, rank)
        copied.hold(node, 20, 1, rank)
    copied.report("d", "c")
    copied.forget()
    for rank, node in enumerate("dc"):
        copied.register(rank, node, nonce=b"second", generation_min=1)
    copied.report(*NODES)
    assert copied.decided() == ("PROPOSED", (20, 1))
    assert set() == spares(copied), "20 and 15 lie only once"

    copied.hold("c", 15, 1, 0, owner="d")
    copied.hold("d", 15, 1, 1, owner="c")
    copied.report("d", "c")

    assert {key.step for node in "dc" for key in copied.view(node).spares} == {10}
    assert {("d", 0), ("d", 1), ("c", 0), ("c", 1)} == spares(copied)

    copied.hold("c", 20, 1, 0, owner="d")
    copied.hold("d", 20, 1, 1, owner="c")
    copied.report("d", "c")

    both = [(node, int(key.step)) for node in "dc" for key in copied.view(node).spares]
    assert [2] * 4 == [both.count((node, step)) for node in "dc" for step in (10, 15)], "20 lies so"


def test_parts_of_a_step_that_the_object_store_has_are_not_spare(chosen):
    """P5: it can be gone back to, and what memory has of it need not be fetched.

    What is older goes: a step that nobody replaces is acknowledged.
    """
    for node in "dc":
        chosen.drop(node, 15, 1, 1)
        chosen.report(node)
    assert {15} == {step for _, step in spared_steps(chosen)}

    chosen.object_tier()
    chosen.put_object(15, 1)
    chosen.change(15, 1, durable_at_s=1.0)
    chosen.settle()

    assert {10} == {step for _, step in spared_steps(chosen)}


def test_a_step_that_was_left_behind_makes_no_older_one_spare(copied):
    """P5: nobody goes back to it, however well it lies."""
    for rank, owner in enumerate("dc"):
        for node in "dc":
            copied.hold(node, 15, 1, rank, owner=owner)
        copied.hold(owner, 20, 2, rank)
    copied.forget(Run(id=RUN, job=JOB, rules=(SupersedeRule(after_step=12, below_generation=2),)))
    for rank, node in enumerate("dc"):
        copied.register(rank, node, nonce=b"second", generation_min=2)
    copied.report(*NODES)

    assert copied.decided() == ("PROPOSED", (20, 2))
    assert set() == spares(copied)


def test_parts_of_a_later_attempt_are_not_spare_for_a_step_of_an_older_one(copied):
    """P5: a catalogue from a backup may choose what the later one went back behind."""
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
    copied.hold("a", 15, 2, 0, owner="b")
    copied.forget()
    for rank, node in enumerate("dc"):
        copied.register(rank, node, nonce=b"third", generation_min=2)
    copied.report(*NODES)

    assert copied.decided() == ("PROPOSED", (20, 1))
    assert set() == spares(copied)


def test_copies_that_lie_apart_are_kept_where_the_policy_asks_for_domains(cluster):
    """4.4: the next of the ring shares the owner's domain, so it keeps none for it."""
    for node, domain in (("d", "x"), ("c", "x"), ("b", "y")):
        cluster.machine(node, domain)
    cluster.join("d", "c", "b")
    cluster.launch(b"first", "d", "c", replica_domain="rack")
    cluster.commit(10, 1, "d", "c")
    assert set() == {key.rank for key in cluster.view("c").spares}

    copy(cluster, "b", 0)

    assert [0] == [key.rank for key in cluster.view("c").spares]
    assert () == cluster.view("b").spares


def test_nothing_is_spare_while_ranks_are_missing_or_nothing_is_chosen(copied):
    """P5: until then placement changes, and what is one too many now may be needed."""
    for node in "ab":
        copy(copied, node, 0)
    assert {("a", 0), ("b", 0)} == spares(copied)

    decision = replace(copied.run.decision, state=DecisionState.PENDING, checkpoint=None)
    copied.run = replace(copied.run, decision=decision)
    assert set() == spares(copied)

    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
    copied.report("d", "c")
    copied.register(0, "d", nonce=b"second")
    copied.report("d")
    assert ("PROPOSED", (20, 1)) == copied.decided()
    assert set() == spares(copied), "rank 1 is not there"

    copied.register(1, "c", nonce=b"second")
    copied.report("c")
    assert spares(copied)


def test_nothing_is_spare_that_is_pinned(copied):
    """A5: whoever reads it finds it, whatever the ring is by then."""
    key = copied.row(10, 1).id
    for node in "ab":
        copy(copied, node, 0)
    told = spares(copied)
    assert told

    copied.run = replace(copied.run, pins=(key,))
    assert set() == spares(copied)

    copied.run = replace(copied.run, pins=())
    assert told == spares(copied)


@pytest.fixture
def draining(cluster):
    """Step 10 of ranks on d and c drains, 20 and 30 are acknowledged after it."""
    cluster.object_tier()
    cluster.join(*NODES)
    return cluster


def train(cluster, nonce=b"first", **wishes):
    return cluster.launch(nonce, "d", "c", persist=PersistRule(steps=10), **wishes)


def test_what_drains_is_spare_where_no_slot_is_counted_for_it_and_stays_with_its_owner(draining):
    """P8: copies of it went with their step; left over, they take no restore's room."""
    train(draining)
    for step in (10, 15):
        draining.commit(step, 1, "d", "c")
    assert [10] == draining.draining()
    assert set() == spares(draining), "agents let copies of 10 go by free_before"

    train(draining, b"second")

    assert draining.decided() == ("PROPOSED", (15, 1))
    assert {("d", 1), ("c", 0)} == spares(draining)


def test_what_drains_gives_way_to_a_restore_where_its_rank_has_two_slots(draining):
    """P5, P8: it is not in the sum, and the restore would wait for the object store."""
    train(draining, slots=2)
    for step in (10, 15):
        draining.commit(step, 1, "d", "c")
    assert set() == spares(draining), "a save does not wait, and takes it from no upload"

    train(draining, b"second", slots=2)

    assert {("d", 0), ("d", 1), ("c", 0), ("c", 1)} == spares(draining)


def test_what_another_node_keeps_for_a_lost_owner_gives_way_restore_or_not(draining):
    """P8: its copy was to go with its step, and the sum has no slot for it there."""
    train(draining)
    for step in (10, 15):
        draining.commit(step, 1, "d", "c")
    draining.drop("d", 10, 1, 0)
    assert set() == spares(draining)

    draining.report("d")

    assert [10] == draining.draining()
    assert {("c", 0)} == spares(draining)
    assert {(10, 0), (10, 1)} == {
        (key.step, key.rank) for key in draining.view("c").runs[0].drained
    }


def test_the_only_copy_of_a_step_that_is_not_behind_yet_is_not_spare_though_it_drains(draining):
    """P5: 10 drains and is the newest; its owner has lost it, and only c has it."""
    train(draining)
    draining.commit(10, 1, "d", "c")
    draining.drop("d", 10, 1, 0)
    draining.report("d")

    assert [10] == draining.draining()
    assert set() == spares(draining)


def wait_until_nobody_is_awaited(cluster):
    """Nodes report so often that no lease ends."""
    ends_s = cluster.now_s + cluster.limits.decide_wait_s
    while cluster.now_s < ends_s:
        cluster.later(cluster.limits.node_lease_s / 2)
        cluster.report(*NODES)


def spared_steps(cluster):
    return {(node, int(key.step)) for node in NODES for key in cluster.view(node).spares}


@pytest.fixture
def chosen(copied):
    """Of 20, never committed, a restore has been proposed; 15 is committed, not acknowledged."""
    copied.deaf = {"d", "c"}
    copied.commit(15, 1, "d", "c")
    copied.register(0, "d", nonce=b"second")
    copied.register(1, "c", nonce=b"second")
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
    copied.report("d", "c")
    assert copied.decided() == ("PROPOSED", (20, 1))
    assert copied.levels().keys() == {(10, 1), (15, 1)}
    return copied


def test_a_step_that_was_chosen_and_never_committed_makes_no_older_one_spare(chosen):
    """P5: its copies are read first; if one is bad, there must be something to go back to."""
    assert set() == spares(chosen)


def test_once_the_chosen_step_lies_as_asked_one_copy_of_what_is_older_is_enough(chosen):
    """P8: after the ring has turned a node may have all of it, and then the restore no room."""
    chosen.hold("c", 20, 1, 0, owner="d")
    chosen.report("c")
    assert set() == spares(chosen), "shard 1 of 20 lies in one place yet"

    chosen.hold("d", 20, 1, 1, owner="c")
    chosen.report("d")

    assert {("c", 0), ("d", 1)} == spares(chosen), "owners keep theirs: 20 may turn out bad"


def test_of_an_older_step_that_was_only_local_one_copy_is_enough_at_once(copied):
    """P5: no node may be lost with it anyway, and its second copies took the restore's room."""
    for rank, node in enumerate("dc"):
        copied.hold(node, 15, 1, rank)
    copied.hold("a", 15, 1, 0, owner="d")
    copied.report(*"dca")
    assert copied.levels() == {(10, 1): "replicated", (15, 1): "local"}
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
        copied.register(rank, node, nonce=b"second")
    copied.report("d", "c")

    assert copied.decided() == ("PROPOSED", (20, 1))
    assert {("a", 0)} == spares(copied), "10 was replicated: a node may be lost with it"


def test_what_was_acknowledged_with_fewer_copies_than_asked_for_was_not_only_local(copied):
    """P5: older steps went for it."""
    for rank, node in enumerate("dc"):
        copied.hold(node, 15, 1, rank)
    copied.hold("a", 15, 1, 0, owner="d")
    copied.report(*"dca")
    copied.change(15, 1, copied_at_s=1.0)
    for rank, node in enumerate("dc"):
        copied.hold(node, 20, 1, rank)
        copied.register(rank, node, nonce=b"second")
    copied.report("d", "c")

    assert copied.decided() == ("PROPOSED", (20, 1))
    assert ("a", 0) not in spares(copied)


def test_what_is_older_than_the_chosen_step_and_nowhere_whole_is_spare_meanwhile(chosen):
    """P8: nobody can go back to it, and it took the restore's room; a part may come."""
    for node in "dc":
        chosen.drop(node, 15, 1, 1)
        chosen.report(node)
    assert {("d", 0), ("c", 0)} == spares(chosen)

    chosen.hold("b", 15, 1, 1, owner="c")
    chosen.report("b")
    chosen.machines["b"].leaving = True
    chosen.report("b")

    assert set() == spares(chosen), "b may come back with it"


def test_what_is_newer_than_the_chosen_step_and_nowhere_whole_is_spare_once_nobody_is_awaited(
    chosen,
):
    """P8: its ranks have ended, and its parts took the restore's room; the rest of it may come."""
    for node in "dc":
        chosen.hold(node, 30, 1, 0, owner="d")
        chosen.report(node)
    assert set() == spares(chosen), "a node that is late may have what rank 1 saved"

    wait_until_nobody_is_awaited(chosen)
    assert ("PROPOSED", (20, 1)) == chosen.decided()
    assert {("d", 30), ("c", 30)} == spared_steps(chosen)

    chosen.hold("c", 30, 1, 1)
    chosen.report("c")

    assert ("PROPOSED", (30, 1)) == chosen.decided()
    assert set() == spared_steps(chosen), "it is whole, and chosen"


def test_a_step_of_the_attempt_that_loads_is_never_spare(chosen):
    """P5: ranks that have loaded save already, and their mates' parts are still to come."""
    for node, rank in (("d", 1), ("c", 0)):
        chosen.hold(node, 20, 1, rank, owner="dc"[rank])
    chosen.ready(("d", 0), ("c", 1))
    chosen.status("d", 0, loaded=True)
    wait_until_nobody_is_awaited(chosen)
    chosen.hold("d", 30, 2, 0)
    chosen.report("d", "c")
    assert chosen.run.loading

    assert ("d", 30) not in spared_steps(chosen)


def test_a_few_copies_are_named_at_a_time_and_then_the_next(copied, monkeypatch):
    """A view is bounded; what is given back is reported, and others are named."""
    monkeypatch.setattr(copies_to_fetch, "SPARES_IN_VIEW_MAX", 1)
    for rank in (0, 1):
        copy(copied, "b", rank)
        copy(copied, "a", rank)
    first = [key.rank for key in copied.view("b").spares]
    assert 1 == len(first)

    copied.drop("b", 10, 1, first[0])
    copied.report("b")

    assert first != [key.rank for key in copied.view("b").spares]


def test_the_owner_keeps_its_shard_and_without_it_one_that_all_rings_name(copied):
    """P5: agents that act on views of different attempts never all give up the same copy."""
    for node in "ab":
        copy(copied, node, 0)
    holders, kept = set("dcab"), {}
    for nonce, ranks in ((b"second", "ba"), (b"third", "ca")):
        generation = copied.launch(nonce, *ranks)
        copied.ready(*((node, rank) for rank, node in enumerate(ranks)))
        for rank, node in enumerate(ranks):
            copied.status(node, rank, loaded=True, generation=generation)
        copied.report(*ranks)
        kept[nonce] = holders - {node for node, rank in spares(copied) if rank == 0}
    assert kept[b"second"] != kept[b"third"]
    assert "d" in kept[b"second"] & kept[b"third"]

    copied.machines["d"].leaving = True
    copied.report("d")

    assert ("a", 0) not in spares(copied), "the first by name"
