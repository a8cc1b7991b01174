"""Levels: all shards of one generation, or nothing; facts stay facts."""

from dataclasses import replace

import pytest

from holdfast.core.node_view import SupersedeRule
from holdfast.core.shard import PRIME
from holdfast.core.sources import Memory
from holdfast_services.metadata.domain.believed_copies import gather, whole
from holdfast_services.metadata.domain.commit_rule import commit
from holdfast_services.metadata.domain.model import (
    ABANDONED_PER_RUN_MAX,
    MEMORY_ROWS_PER_RUN_MAX,
    Stored,
)


def start(cluster, *nodes, replicas=1):
    cluster.join(*nodes)
    return cluster.launch(b"first", *nodes, replicas=replicas)


def test_local_needs_every_shard_and_replicated_every_copy(cluster):
    """P1, F61."""
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    cluster.report("a")
    assert cluster.levels() == {}
    cluster.hold("b", 5, generation, 1)
    cluster.report("b")
    assert cluster.levels() == {(5, generation): "local"}
    cluster.hold("b", 5, generation, 0, owner="a")
    cluster.report("b")
    assert cluster.levels() == {(5, generation): "local"}

    cluster.hold("a", 5, generation, 1, owner="b")
    cluster.report("a")

    assert cluster.levels() == {(5, generation): "replicated"}


def test_an_older_generation_commits_no_new_step(cluster):
    """P2: its shards are evidence for a restore and nothing else."""
    first = start(cluster, "a", "b")
    second = cluster.launch(b"second", "a", "b")
    for rank, node in enumerate("ab"):
        cluster.hold(node, 5, first, rank)
    cluster.report("a", "b")

    assert cluster.levels() == {}
    assert second == first + 1


def test_a_level_outlives_the_copies_that_proved_it(cluster):
    generation = start(cluster, "a", "b")
    for node in "ab":
        for rank in range(2):
            cluster.hold(node, 5, generation, rank, owner="ab"[rank])
    cluster.report("a", "b")
    cluster.wipe("b")
    cluster.report("b")

    assert cluster.levels() == {(5, generation): "replicated"}


def test_late_duplicate_and_reordered_reports_change_nothing(cluster):
    """F60: the newest inventory wins, however they arrive."""
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    cluster.hold("b", 5, generation, 1)
    old = cluster.inventory("a")
    cluster.report("a", "b")
    after = cluster.run

    cluster.deliver(old)
    cluster.deliver(cluster.inventory("b"))
    cluster.deliver(cluster.inventory("b"))

    assert cluster.run == after


def test_an_inventory_of_an_older_incarnation_is_not_believed(cluster):
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    ghost = cluster.inventory("a")
    cluster.wipe("a")
    cluster.report("a")

    cluster.deliver(ghost)
    cluster.hold("b", 5, generation, 1)
    cluster.report("b")

    assert cluster.levels() == {}


def test_copies_that_disagree_are_different_things(cluster):
    """P3: a copy with another digest is no copy; the owner's word counts."""
    generation = start(cluster, "a", "b")
    for rank, node in enumerate("ab"):
        cluster.hold(node, 5, generation, rank)
    cluster.hold("b", 5, generation, 0, owner="a", digest=b"x" * 16)
    cluster.hold("a", 5, generation, 1, owner="b")
    cluster.report("a", "b")

    assert cluster.levels() == {(5, generation): "local"}


def test_shards_of_a_lost_node_do_not_commit(cluster):
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    cluster.report("a")
    cluster.later(6.0)
    cluster.hold("b", 5, generation, 1)
    cluster.report("b")

    assert cluster.levels() == {}


def test_an_abandoned_step_is_never_committed_and_a_committed_one_never_abandoned(cluster):
    """4.1: all ranks save a step or none does."""
    generation = start(cluster, "a", "b")
    for step in (5, 6):
        cluster.hold("a", step, generation, 0)
    cluster.hold("b", 6, generation, 1)
    cluster.abandon("b", 5, generation)
    cluster.report("a", "b")
    cluster.abandon("b", 6, generation)
    cluster.hold("b", 5, generation, 1)
    cluster.report("b")

    assert cluster.levels() == {(6, generation): "local"}
    assert [item.step for item in cluster.view("a").runs[0].abandoned] == [5]
    assert cluster.kinds().count("step_abandoned") == 1


def test_rows_of_a_run_are_bounded_and_the_pin_wins(cluster):
    """4.7: expiry against a restore decision, in the rule that prunes."""
    generation = start(cluster, "a", replicas=0)
    for step in range(1, MEMORY_ROWS_PER_RUN_MAX + 10):
        cluster.hold("a", step, generation, 0, world=1)
        cluster.report("a")
        cluster.drop("a", step, generation, 0)
        cluster.later(0.1)
    assert len(cluster.run.checkpoints) == MEMORY_ROWS_PER_RUN_MAX
    oldest = cluster.run.checkpoints[-1].id
    run = cluster.run
    pinned = type(run)(
        **{name: getattr(run, name) for name in run.__dataclass_fields__} | {"pins": (oldest,)}
    )
    cluster.hold("a", 999, generation, 0, world=1)
    cluster.run = pinned
    nodes = {
        "a": type(cluster.nodes["a"])(
            inventory=cluster.inventory("a"),
            reported_at_s=cluster.now_s,
            lease_until_s=cluster.now_s + 5,
        )
    }

    after = commit(
        pinned, gather(run.id, tuple(nodes.values()), cluster.now_s), nodes.values(), cluster.now_s
    )

    assert oldest in {row.id for row in after.checkpoints}
    assert 999 in {row.id.step for row in after.checkpoints}


@pytest.mark.parametrize(
    ("plans", "told"),
    [
        (("one.all", "two.all"), False),
        (("one.all", "two.less"), True),
        (("one.all", "two"), False),
        (("one", "two"), False),
    ],
)
def test_a_step_whose_ranks_shared_out_other_tensors_is_given_up_and_they_are_named(
    cluster, plans, told
):
    """F38: each of them leaves to the other what that does not have; nobody could restore it."""
    generation = start(cluster, "a", "b")
    for rank, (node, plan) in enumerate(zip("ab", plans, strict=True)):
        cluster.hold(node, 5, generation, rank, plan=plan)
    cluster.report("a", "b")

    assert told == ((5, generation) not in cluster.levels())
    reasons = [step.reason for step in cluster.view("a").runs[0].abandoned]
    assert told == bool(reasons)
    assert all("ranks 0 and 1 do not have the same tensors" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("tallies", "told"),
    [((5, -5), False), ((5, -4), True), ((0, 0), False), ((5, None), False)],
    ids=["add up", "do not", "none in common", "one of an older release"],
)
def test_a_step_whose_boxes_do_not_add_up_never_commits(cluster, tallies, told):
    """F38: seen before the commit, by one number of each rank, and not before all are there."""
    generation = start(cluster, "a", "b")
    plans = [
        "own.all" if number is None else f"own-{number % PRIME:014x}.all" for number in tallies
    ]
    cluster.hold("a", 5, generation, 0, plan=plans[0])
    cluster.report("a", "b")
    assert () == cluster.view("a").runs[0].abandoned
    cluster.hold("b", 5, generation, 1, plan=plans[1])
    cluster.report("a", "b")

    assert told == ((5, generation) not in cluster.levels())
    reasons = [step.reason for step in cluster.view("a").runs[0].abandoned]
    assert told == any("leave a hole, or overlap" in reason for reason in reasons)


def test_abandoned_steps_are_bounded(cluster):
    generation = start(cluster, "a", replicas=0)
    for step in range(1, 2 * ABANDONED_PER_RUN_MAX):
        cluster.abandon("a", step, generation)
    cluster.report("a")

    assert len(cluster.run.abandoned) == ABANDONED_PER_RUN_MAX
    assert cluster.run.abandoned[0].step == 2 * ABANDONED_PER_RUN_MAX - 1


def test_an_emptied_owner_gets_its_own_shards_back_and_the_next_node_what_it_stands_for(cluster):
    """F55: the same answer from everybody; without its owner no more than what is missing."""
    generation = start(cluster, "a", "b")
    cluster.join("c")
    for node in "ab":
        for rank in range(2):
            cluster.hold(node, 5, generation, rank, owner="ab"[rank])
    cluster.report("a", "b")
    placed = [want.shard.id.rank for want in cluster.view("c").wants]
    assert placed == [1], "b asks it too, since c is the next"

    cluster.wipe("b")
    cluster.report("b")

    back = [
        (want.shard.id.rank, want.sources, want.reason.name) for want in cluster.view("b").wants
    ]
    assert back == [(0, (Memory("a"),), "REPAIR"), (1, (Memory("a"),), "REPAIR")]
    assert placed == [want.shard.id.rank for want in cluster.view("c").wants]
    cluster.later(6.0)
    cluster.report("a", "c")
    assert {want.shard.id.rank for want in cluster.view("c").wants} == {0, 1}


def test_who_came_back_empty_gets_its_part_though_others_hold_as_many_as_asked(cluster):
    """P5: they hold more than their share of two steps, and have no room for what is missing."""
    generation = start(cluster, "a", "b", "c")
    cluster.commit(5, generation, "a", "b", "c")
    for node, rank in (("c", 0), ("a", 1)):
        cluster.hold(node, 5, generation, rank, world=3, owner="abc"[rank])
    cluster.report("a", "c")
    assert not any(cluster.view(node).wants for node in "abc"), "all have all"

    cluster.wipe("b")
    cluster.report("b")

    back = [(want.shard.id.rank, want.owner) for want in cluster.view("b").wants]
    assert back == [(0, "a"), (1, "b")]


def test_what_a_lost_owner_has_left_is_copied_into_the_next_domain_that_has_none(cluster):
    """F55: two copies in one domain go together."""
    for node, domain in zip("abcde", "xyyzw", strict=True):
        cluster.machine(node, domain)
    cluster.join(*"abcde")
    generation = cluster.launch(b"first", "a", "b", replica_domain="rack")
    for rank, owner in enumerate("ab"):
        for node in "ab":
            cluster.hold(node, 5, generation, rank, owner=owner)
    cluster.report("a", "b")
    cluster.machines["a"].leaving = True
    cluster.report("a")

    wanted = {node: [w.shard.id.rank for w in cluster.view(node).wants] for node in "bcde"}
    assert wanted == {"b": [], "c": [], "d": [0, 1], "e": []}


def test_the_newest_step_is_repaired_before_the_one_that_is_kept(cluster):
    """P5: where one slot is left its copy is what lets the older ones go."""
    generation = start(cluster, "a", "b")
    cluster.commit(5, generation, "a", "b")
    cluster.deaf = {"a", "b"}
    cluster.commit(6, generation, "a", "b")
    assert cluster.view("a").runs[0].free_before.step == 5

    cluster.wipe("b")
    cluster.report("b")

    assert [want.shard.id.step for want in cluster.view("b").wants] == [6, 6, 5, 5]


def test_what_was_restored_is_repaired_until_something_newer_is_kept(cluster):
    """P5: it lets what is older go, where a newer step lacks the room of that."""
    start(cluster, "a", "b")
    for rank, node in enumerate("ab"):
        cluster.hold(node, 5, 1, rank)
    cluster.report("a", "b")
    second = cluster.launch(b"second", "a", "b")
    cluster.ready(("a", 0), ("b", 1))
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, loaded=True)
    cluster.deaf = {"a", "b"}
    cluster.commit(6, second, "a", "b")
    assert cluster.levels() == {(5, 1): "local", (6, 2): "replicated"}
    assert [want.shard.id.step for want in cluster.view("a").wants] == [5]

    cluster.deaf = set()
    cluster.report("a", "b")
    assert cluster.view("a").runs[0].free_before.step == 6
    assert () == cluster.view("a").wants


def test_a_step_that_was_left_behind_is_not_repaired(cluster):
    """4.5: nobody goes back to it, and it would take the room of what is kept."""
    generation = start(cluster, "a", "b")
    cluster.commit(5, generation, "a", "b")
    cluster.commit(6, generation, "a", "b")
    rule = SupersedeRule(after_step=5, below_generation=generation + 1)
    cluster.run = replace(cluster.run, rules=(rule,))

    cluster.wipe("b")
    cluster.report("b")

    assert {want.shard.id.step for want in cluster.view("b").wants} == {5}


def test_a_heartbeat_that_says_nothing_new_leaves_the_view_alone(cluster):
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    cluster.report("a")
    before = cluster.view("a")
    cluster.later(1.0)
    cluster.report("a", "b")

    assert replace(cluster.view("a"), taken_sequence=before.taken_sequence) == before


def half(cluster, *, step=5, saving=(), passed=6, sealed=0):
    """Rank 0 holds ``step``, rank 1 does not."""
    generation = start(cluster, "a", "b")
    cluster.status("a", 0, step=step)
    cluster.hold("a", step, generation, 0)
    cluster.status("b", 1, step=passed, saving=saving, sealed_before=sealed)
    cluster.report("a", "b")
    return [item.step for item in cluster.run.abandoned]


def test_a_step_that_a_rank_has_passed_without_a_segment_is_abandoned(cluster):
    """Else the slots of the others would be kept for a step that never gets whole (4.1)."""
    assert half(cluster) == [5]


def test_a_step_that_a_rank_has_begun_or_not_reached_is_waited_for(cluster):
    assert half(cluster, saving=(5,)) == []


def test_a_step_that_a_rank_is_just_completing_is_waited_for(cluster):
    assert half(cluster, passed=5) == []


def test_a_segment_that_was_lost_with_its_nodes_memory_is_waited_for_by_nobody(cluster):
    """4.7: training may wait for that very step, and pass no other meanwhile."""
    assert half(cluster, passed=5, sealed=5) == []
    assert half(cluster, passed=5, sealed=6, saving=(5,)) == []
    assert half(cluster, passed=5, sealed=6) == [5]


def test_step_0_is_waited_for_by_who_has_sealed_nothing(cluster):
    """A rank that is later than others with its first save had lost it, as long as 0 was none."""
    assert half(cluster, step=0, passed=0) == []
    assert half(cluster, step=0, passed=0, sealed=1) == [0]


def test_a_committed_step_whose_part_was_lost_is_abandoned_unless_it_is_safe(cluster):
    generation = start(cluster, "a", "b", "c")
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, step=5)
        cluster.hold(node, 5, generation, rank)
    cluster.report("a", "b", "c")
    assert list(cluster.levels()) == [(5, generation)]

    cluster.machine("b").shards.clear()
    cluster.status("b", 1, step=5, sealed_before=6)
    cluster.report("b")

    [given_up] = cluster.run.abandoned
    assert (given_up.step, given_up.reason) == (5, "the segment of rank 1 was lost")


@pytest.mark.parametrize(
    ("sealed_before", "reason"),
    [
        (5, "rank 1 went on without saving it"),
        (7, "rank 1 went on without saving it, or its segment was lost"),
    ],
)
def test_a_step_that_a_rank_has_passed_is_not_said_to_be_lost(cluster, sealed_before, reason):
    """It never had that step if it calls its steps otherwise, and metadata may look late."""
    generation = start(cluster, "a", "b")
    cluster.status("a", 0, step=5)
    cluster.hold("a", 5, generation, 0)
    cluster.status("b", 1, step=6, sealed_before=sealed_before)
    cluster.report("a", "b")

    [given_up] = cluster.run.abandoned
    assert (given_up.step, given_up.reason) == (5, reason)


def test_a_segment_on_a_node_that_is_away_is_waited_for(cluster):
    generation = start(cluster, "a", "b", "c")
    for rank, node in enumerate("abc"):
        cluster.status(node, rank, step=6)
        cluster.hold(node, 5, generation, rank, world=3)
    cluster.machine("c").shards.clear()
    cluster.status("c", 2, saving=(5,))
    cluster.report("a")
    cluster.later(6)
    cluster.report("b", "c")

    assert cluster.run.abandoned == ()


def test_what_is_freed_as_old_is_not_called_abandoned(cluster):
    """A node that was away still holds a part of it long after its row has gone."""
    generation = start(cluster, "a", "b", replicas=0)
    cluster.hold("a", 5, generation, 0)
    for rank, node in enumerate("ab"):
        cluster.hold(node, 7, generation, rank)
        cluster.status(node, rank, step=8)
    cluster.status("b", 1, saving=(5,))
    cluster.report("b", "a")
    cluster.status("b", 1, saving=())
    cluster.report("b")

    assert list(cluster.levels()) == [(7, generation)]
    assert cluster.run.abandoned == ()


def test_an_abandoned_step_that_is_held_outlives_any_number_of_later_ones(cluster):
    """A rank that could not save for long has a short memory of which steps those were."""
    generation = start(cluster, "a", "b")
    cluster.hold("a", 5, generation, 0)
    cluster.status("b", 1, step=1000)
    for step in range(900, 900 + 2 * ABANDONED_PER_RUN_MAX):
        cluster.abandon("b", step, generation)
    cluster.report("a", "b")

    assert 5 in {item.step for item in cluster.view("a").runs[0].abandoned}
    assert len(cluster.run.abandoned) == ABANDONED_PER_RUN_MAX


def test_volumes_that_nobody_counts_make_nothing_whole_but_by_a_manifest(cluster):
    """P1; defect X13: rank 1 has two volumes, or three of which one is missing: who knows?"""
    generation = start(cluster, "a", replicas=0)
    first = cluster.run.checkpoints
    cluster.hold("a", 5, generation, 0, world=1)
    held = next(iter(cluster.machine("a").shards.values()))
    key = replace(held.shard.id, volume=1)
    cluster.machine("a").shards[key] = replace(held, shard=replace(held.shard, id=key))
    cluster.report("a")

    assert first == cluster.run.checkpoints == ()
    shards = tuple(item.shard for item in cluster.machine("a").shards.values())
    stored = Stored(checkpoint=key.checkpoint, shards=shards)
    nodes = tuple(cluster.nodes.values())
    assert whole(gather(cluster.run.id, nodes, cluster.now_s, (stored,)).sources[key.checkpoint])
