"""Nodes of the next round begin to fetch the last step of the round before (ADR 0077)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.metadata.conftest import JOB, RUN, shard
from tests.unit.metadata.test_restore_decision import save

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.attempts import named_nonce
from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import SupersedeRule, WantReason
from holdfast.core.sources import Memory
from holdfast_services.metadata.domain.early_copies import EARLY_COPIES_S_MAX, LAST_STEP_S_MAX
from holdfast_services.metadata.domain.launch import Launch, Member
from holdfast_services.metadata.domain.node_view import node_view, world

STEP = 8
SEGMENT = 100


def has_ended(cluster, *nodes, copies=False, **wishes):
    """A round of one rank per node has saved its last step; with ``copies`` each shard has one."""
    cluster.join(*nodes)
    wishes = {"replicas": int(copies), **wishes}
    generation = cluster.launch(named_nonce("L.1"), *nodes, **wishes)
    save(cluster, STEP, generation, nodes, copies=copies)
    assert list(cluster.levels()) == [(STEP, generation)]
    announce(cluster)


def announce(cluster, step=STEP, reason=SaveReason.RESCALE, ago_s=0.0):
    announcement = Announcement(step=step, reason=reason)
    at_s = cluster.now_s - ago_s
    cluster.run = replace(cluster.run, announcement=announcement, announced_at_s=at_s)


def begins(cluster, *nodes, number=2, ranks=1, **fields):
    """The next round has one rank, or so many, on each of the nodes."""
    cluster.join(*(node for node in nodes if node not in cluster.machines))
    members = tuple(Member(launcher=node * 16, node=node, ranks=ranks) for node in nodes)
    fields = {"on": True, "began_at_s": cluster.now_s, **fields}
    cluster.launches = (
        Launch(job="another", id="M", number=2, on=True, began_at_s=cluster.now_s),
        Launch(job=JOB, **{"id": "L", "number": number, "members": members, **fields}),
    )


def early(cluster, *nodes):
    """Return node -> ranks whose shards it should fetch, in that order."""
    return {
        node: [int(want.shard.id.rank) for want in cluster.view(node).wants]
        for node in nodes
        if cluster.view(node).wants
    }


@pytest.fixture
def grown(cluster):
    """Ranks of a and b have ended after a last step; c comes beside them."""
    has_ended(cluster, "a", "b")
    begins(cluster, "a", "b", "c")
    return cluster


def test_nodes_of_the_next_round_fetch_what_they_lack_of_the_last_step(grown):
    view = grown.view("c")

    assert {"a": [1], "b": [0], "c": [0, 1]} == early(grown, "a", "b", "c")
    assert {WantReason.REPAIR} == {want.reason for want in view.wants}
    assert [(Memory("a"),), (Memory("b"),)] == [want.sources for want in view.wants]
    assert ["a", "b"] == [want.owner for want in view.wants]
    assert [RUN] == [run.run for run in view.runs]


def test_what_has_come_is_not_wanted_any_more(grown):
    grown.hold("c", STEP, 1, 0, owner="a")
    grown.report("c")

    assert [1] == early(grown, "c")["c"]


def test_a_node_that_has_no_place_fetches_nothing(grown):
    grown.join("d")

    assert {} == early(grown, "d")


def test_of_a_member_whose_agent_is_not_there_nothing_is_said(grown):
    grown.machines["c"].leaving = True
    grown.report("c")

    assert {"a": [1], "b": [0]} == early(grown, "a", "b", "c")


NOTHING = {
    "nobody has announced a last step": lambda c: replace(c.run, announcement=None),
    "the announcement was taken back": lambda c: announce(c, reason=SaveReason.OPERATOR) or c.run,
    "the last step is not committed": lambda c: announce(c, step=STEP + 1) or c.run,
    "that is long ago": lambda c: announce(c, ago_s=LAST_STEP_S_MAX) or c.run,
    "it was left behind": lambda c: replace(c.run, checkpoints=()),
    "the attempt was fenced": lambda c: replace(c.run, generation=c.run.generation + 1),
    "no attempt is known": lambda c: replace(c.run, attempt=None),
}


@pytest.mark.parametrize("why", NOTHING)
def test_nothing_is_fetched_early_of_a_run_if(grown, why):
    grown.run = NOTHING[why](grown)

    assert {} == early(grown, "a", "b", "c")


def test_a_step_that_came_after_the_announced_one_is_what_is_fetched(grown):
    """The round ends after it too, where the announced one took too long."""
    save(grown, STEP + 1, 1, ("a", "b"), copies=False)

    wants = grown.view("c").wants
    assert [(STEP + 1, 0), (STEP + 1, 1)] == [(w.shard.id.step, w.shard.id.rank) for w in wants]


def test_a_later_step_of_an_attempt_before_is_not_the_last_one(grown):
    """Nothing says any more that it was left behind, where the catalogue was lost since."""
    announce(grown, step=STEP + 1)
    save(grown, STEP + 2, 0, ("a", "b"), copies=False)
    former = replace(grown.row(STEP, 1), id=CheckpointId(RUN, STEP + 2, 0))
    grown.run = replace(grown.run, checkpoints=(former, *grown.run.checkpoints), rules=())

    assert {} == early(grown, "a", "b", "c")


def test_a_step_that_was_left_behind_is_not_fetched(grown):
    save(grown, STEP + 1, 1, ("a", "b"), copies=False)
    rule = SupersedeRule(after_step=STEP, below_generation=2)
    grown.run = replace(grown.run, rules=(rule,))

    assert {STEP} == {want.shard.id.step for want in grown.view("c").wants}


@pytest.mark.parametrize(
    "fields",
    [
        {"on": False},
        {"number": 3},
        {"number": 1},
        {"id": "N"},
        {"began_at_s": 1000.0 - EARLY_COPIES_S_MAX},
    ],
    ids=["none is on", "it is a later one", "it is the same one", "another launch", "long ago"],
)
def test_nothing_is_fetched_early_for_a_round_if(grown, fields):
    begins(grown, "a", "b", "c", **fields)

    assert {} == early(grown, "a", "b", "c")


def test_nothing_is_fetched_early_of_a_step_that_lost_a_shard(grown):
    """What is restored then is another one, or comes from the object store."""
    grown.drop("b", STEP, 1, 1)
    grown.report("b")

    assert {} == early(grown, "a", "b", "c")


def test_the_registration_of_the_next_attempt_ends_it(grown):
    """The fence: its restore wants what it needs, at its own urgency."""
    nonce = named_nonce("L.2")
    grown.register(0, "a", world=3, nonce=nonce, replicas=0)
    assert {} == early(grown, "a", "b", "c")

    for rank, node in ((1, "b"), (2, "c")):
        grown.register(rank, node, world=3, nonce=nonce, replicas=0)
    grown.report("a", "b", "c")

    assert ("PROPOSED", (STEP, 1)) == grown.decided()
    wants = grown.view("c").wants
    assert [(WantReason.RESTORE, 0), (WantReason.RESTORE, 1)] == [
        (want.reason, want.shard.id.rank) for want in wants
    ]


@pytest.mark.parametrize(
    ("room", "ranks"),
    [(0, None), (SEGMENT - 1, None), (SEGMENT, [0]), (2 * SEGMENT - 1, [0]), (2 * SEGMENT, [0, 1])],
)
def test_no_more_is_named_than_a_node_has_room_for(grown, room, ranks):
    grown.machines["c"].room_bytes = room
    grown.report("c")

    assert early(grown, "c").get("c") == ranks


def test_runs_of_one_round_share_the_room(grown):
    """A script with two Checkpointers has two."""
    other = replace(grown.run, id="f" * 12, job="gpt/ema")
    for rank, node in enumerate("ab"):
        grown.hold(node, STEP, 1, rank)
        item = shard(STEP, 1, rank)
        held = grown.machines[node].shards[item.id]
        renamed = replace(item, id=replace(item.id, run=other.id))
        grown.machines[node].shards[renamed.id] = replace(held, shard=renamed)
    rows = tuple(
        replace(row, id=CheckpointId(other.id, row.id.step, row.id.generation))
        for row in grown.run.checkpoints
    )
    other = replace(other, checkpoints=rows, decision=None)
    grown.machines["c"].room_bytes = 3 * SEGMENT
    grown.report("a", "b", "c")

    runs = (grown.run, other)
    all_of_it = world(grown.nodes, runs, grown.now_s, grown.limits, grown.launches)
    wants = node_view(all_of_it, "c").wants

    assert [(RUN, 0), (RUN, 1), (other.id, 0)] == [(w.shard.id.run, w.shard.id.rank) for w in wants]


def test_copies_that_are_made_up_have_their_room_first_and_are_named_once(cluster):
    """The round ends with the commit, before its step is replicated."""
    has_ended(cluster, "a", "b", copies=True)
    cluster.drop("b", STEP, 1, 0)
    cluster.machines["b"].room_bytes = SEGMENT
    cluster.report("b")
    assert {"b": [0]} == early(cluster, "a", "b")

    begins(cluster, "a", "b", "c")
    assert {"b": [0], "c": [1, 0]} == early(cluster, "a", "b", "c"), "a copy of 1 belongs there"


def test_the_room_of_a_copy_that_is_made_up_is_not_given_to_an_early_one(cluster):
    has_ended(cluster, "a", "b", "c", copies=True)
    cluster.drop("b", STEP, 1, 0)
    cluster.machines["b"].room_bytes = 2 * SEGMENT - 1
    cluster.report("b")
    assert {"b": [0]} == early(cluster, "b")

    begins(cluster, "a", "b", "c")
    assert {"b": [0]} == early(cluster, "b"), "and no shard of rank 2"


def test_nodes_that_lack_the_same_begin_with_another_holder(cluster):
    has_ended(cluster, "a", "b", copies=True)
    begins(cluster, "a", "b", "c", "d")

    wants = [want for node in "cd" for want in cluster.view(node).wants]
    first = {want.sources[0] for want in wants if want.shard.id.rank == 0}

    assert {Memory("a"), Memory("b")} == first


NEEDS = {
    "as many": ("abc", "xyz", 1, {"x": [0], "y": [1], "z": [2]}),
    "twice as many": ("ab", "wxyz", 1, {"w": [0], "x": [0], "y": [1], "z": [1]}),
    "one more": ("ab", "xyz", 1, {"x": [0], "y": [0, 1], "z": [1]}),
    "one less": ("abc", "xy", 1, {"x": [0, 1], "y": [1, 2]}),
    "all on one": ("abc", "x", 1, {"x": [0, 1, 2]}),
    "two on each": ("abcd", "xy", 2, {"x": [0, 1], "y": [2, 3]}),
    "three on each": ("abcd", "xy", 3, {"x": [0, 1], "y": [2, 3]}),
}


@pytest.mark.parametrize(("before", "after", "ranks", "needs"), NEEDS.values(), ids=NEEDS)
def test_who_names_its_needs_gets_what_overlaps_its_part(cluster, before, after, ranks, needs):
    """Rank r of n has [r/n, (r+1)/n) of a dimension, as nobody has said yet."""
    has_ended(cluster, *before, names_needs=True)
    begins(cluster, *after, ranks=ranks)

    assert needs == early(cluster, *after)


@pytest.mark.parametrize(
    ("room", "named"), [(2 * SEGMENT - 1, []), (2 * SEGMENT, [0])], ids=["too little", "enough"]
)
def test_a_guess_leaves_room_for_all_that_it_may_have_missed(cluster, room, named):
    """No restore waits for the room of a copy that nobody needs: it is of the very step."""
    has_ended(cluster, "a", "b", names_needs=True)
    begins(cluster, "x", "y")
    for node in "xy":
        cluster.machines[node].room_bytes = room
        cluster.report(node)

    assert named == early(cluster, "x").get("x", [])
