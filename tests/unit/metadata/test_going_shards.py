"""What only nodes have that will be taken away comes to others while there is time (ADR 0077)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.metadata.conftest import JOB, RUN, Cluster
from tests.unit.metadata.test_early_copies import SEGMENT, STEP, announce, has_ended

from holdfast.core.announcements import SaveReason
from holdfast.core.node_view import Want, WantReason
from holdfast.core.sources import Memory, Object, Piece, Rebuilt
from holdfast_services.metadata.domain.believed_copies import gather
from holdfast_services.metadata.domain.early_copies import LAST_STEP_S_MAX
from holdfast_services.metadata.domain.going_shards import (
    RANKS_NAMED_MAX,
    from_who_stay,
    going_shards,
    notice_over,
)
from holdfast_services.metadata.domain.launch import (
    EndReason,
    Launch,
    Launcher,
    Member,
    RoundEnd,
)
from holdfast_services.metadata.domain.notices import who_go
from holdfast_services.metadata.domain.round_end import is_safe


def go(cluster, *going, job=JOB, others=("a", "b", "c")):
    """The launchers of these nodes say that they go; they are of the round that has just saved."""
    names = sorted({*going, *others})
    launchers = tuple(
        Launcher(
            id=node * 16, sequence=1, node=node, address=node, holder=node, ranks=1, port=7,
            joined_at_s=1.0, goes_at_s=cluster.now_s + 30.0 if node in going else 0.0,
        )
        for node in names
    )  # fmt: skip
    members = tuple(Member(launcher=node * 16, node=node, ranks=1) for node in names)
    launch = Launch(job=job, id="L", number=1, launchers=launchers, members=members, on=True)
    cluster.launches = (Launch(job="another", id="M", number=2, on=True), launch)
    return launch


def wanted(cluster):
    """Return node -> ranks whose shards it should fetch, in that order."""
    views = {node: cluster.view(node).wants for node in sorted(cluster.machines)}
    return {node: [int(w.shard.id.rank) for w in wants] for node, wants in views.items() if wants}


@pytest.fixture
def three(cluster):
    """Ranks of a, b and c have saved a last step, and no copy is made; c will be taken away."""
    has_ended(cluster, "a", "b", "c")
    go(cluster, "c")
    return cluster


def test_the_next_node_of_the_ring_fetches_what_only_a_node_has_that_goes(three):
    [want] = three.view("a").wants

    assert {"a": [2]} == wanted(three)
    assert WantReason.REPAIR is want.reason
    assert (Memory("c"),) == want.sources
    assert ("c", RUN) == (want.owner, want.shard.id.run)


def test_what_has_come_is_not_wanted_any_more(three):
    three.hold("b", STEP, 1, 2, world=3, owner="c")
    three.report("b")

    assert {} == wanted(three)


def test_that_another_node_has_it_that_goes_as_well_is_no_help(three):
    three.hold("b", STEP, 1, 2, world=3, owner="c")
    three.report("b")
    go(three, "b", "c")

    assert {"a": [1, 2]} == wanted(three)


def test_a_node_that_goes_fetches_nothing_for_another(three):
    go(three, "a", "b", "c")
    assert {} == wanted(three)


def test_nobody_goes_and_nothing_is_fetched(three):
    go(three)
    assert {} == wanted(three)


def test_a_notice_of_another_job_is_one_of_the_node(three):
    go(three, "c", job="another", others=())
    assert {"a": [2]} == wanted(three)


def test_the_ring_goes_on_after_the_node(three):
    go(three, "a")
    assert {"b": [0]} == wanted(three)
    go(three, "b")
    assert {"c": [1]} == wanted(three)


def test_the_round_ends_once_others_have_what_a_node_alone_holds(three):
    says_steps(three, "a", "b", "c")
    asked = RoundEnd(reason=EndReason.NOTICE, asked_at_s=three.now_s, copied=True)

    def safe(*going, end=asked):
        return is_safe([three.run], three.nodes, end, three.now_s, going)

    assert not safe("c")
    assert safe("c", end=replace(asked, copied=False)), "nobody waits for that"
    three.hold("c", STEP, 1, 0, world=3, owner="a")
    three.report("c")
    assert not safe("c"), "it is what stays that lies twice"
    three.hold("b", STEP, 1, 2, world=3, owner="c")
    three.report("b")
    assert safe("c")
    assert not safe("b", "c")


@pytest.mark.parametrize(("a", "b", "where"), [(99, 100, {"b": [2]}), (99, 99, {})])
def test_who_has_no_room_is_passed_by(three, a, b, where):
    three.machines["a"].room_bytes, three.machines["b"].room_bytes = a, b
    three.report("a", "b")

    assert where == wanted(three)


def test_each_copy_takes_its_room(cluster):
    has_ended(cluster, "a", "b", "c", "d")
    cluster.machines["a"].room_bytes = SEGMENT
    cluster.report("a")
    go(cluster, "c", "d")

    assert {"a": [2], "b": [3]} == wanted(cluster)


def test_another_failure_domain_comes_first(cluster):
    for node, domain in (("a", "x"), ("b", "y"), ("c", "x")):
        cluster.machine(node, domain)
    has_ended(cluster, "a", "b", "c")
    go(cluster, "c")
    assert {"b": [2]} == wanted(cluster)

    cluster.machines["b"].room_bytes = 0
    cluster.report("b")
    assert {"a": [2]} == wanted(cluster), "better there than nowhere"


def test_a_node_of_a_rank_comes_before_a_spare_one(cluster):
    has_ended(cluster, "a", "b")
    cluster.join("s")
    go(cluster, "b")
    assert {"a": [1]} == wanted(cluster)

    cluster.machines["a"].room_bytes = 0
    cluster.report("a")
    assert {"s": [1]} == wanted(cluster)


def test_a_node_without_a_lease_fetches_nothing(three):
    three.machines["a"].leaving = True
    three.report("a")

    assert {"b": [2]} == wanted(three)


def test_a_node_that_has_gone_already_is_not_waited_for(three):
    three.machines["c"].leaving = True
    three.report("c")

    assert {} == wanted(three)
    assert () == left(three, "c")


NOTHING = {
    "nobody has announced a last step": lambda c: replace(c.run, announcement=None),
    "the announcement was taken back": lambda c: announce(c, reason=SaveReason.OPERATOR) or c.run,
    "the last step is not committed": lambda c: announce(c, step=STEP + 1) or c.run,
    "that is long ago": lambda c: announce(c, ago_s=LAST_STEP_S_MAX) or c.run,
}


def says_steps(cluster, *nodes):
    for rank, node in enumerate(nodes):
        cluster.status(node, rank, step=STEP, step_s=1.0, loaded=True)
    cluster.report(*nodes)


@pytest.mark.parametrize("why", NOTHING)
def test_an_older_step_is_not_moved_if(three, why):
    says_steps(three, "a", "b", "c")
    assert {"a": [2]} == wanted(three)
    three.run = NOTHING[why](three)

    assert {} == wanted(three)


def test_of_a_script_that_saves_by_itself_the_next_step_is_the_last_one(three):
    """Its ranks say no step, so it may be any number."""
    announce(three, step=1000, ago_s=1.0)
    assert {"a": [2]} == wanted(three)
    announce(three, step=1000)
    assert {} == wanted(three), "it was saved before the notice"
    announce(three, step=1000, ago_s=1.0)
    says_steps(three, "a", "b", "c")
    assert {} == wanted(three), "its ranks say how far they are"


def test_of_a_script_that_saves_by_itself_nothing_is_moved_before_a_notice(three):
    three.run = replace(three.run, announcement=None, announced_at_s=0.0)
    assert {} == wanted(three)


def test_copies_that_are_made_up_where_a_node_stays_are_not_made_twice(cluster):
    has_ended(cluster, "a", "b", "c", replicas=1)
    go(cluster, "c")

    assert {"a": [2], "b": [0], "c": [1]} == wanted(cluster)


def test_copies_that_are_made_up_on_nodes_that_go_are_none(cluster):
    has_ended(cluster, "a", "b", "c", replicas=1)
    go(cluster, "b", "c")

    found = wanted(cluster)
    assert {1, 2} <= set(found["a"])


def left(cluster, *going):
    evidence = gather(RUN, tuple(cluster.nodes.values()), cluster.now_s, cluster.run.stored)
    copies = evidence.sources.get(cluster.run.checkpoints[0].id, {})
    return tuple(int(item.shard.id.rank) for item in going_shards(copies, going))


def test_what_is_durable_or_follows_from_others_goes_with_nobody(three):
    key = three.run.checkpoints[0].id
    evidence = gather(RUN, tuple(three.nodes.values()), three.now_s)
    copies = dict(evidence.sources[key])
    [item] = going_shards(copies, {"c"})

    assert () == going_shards({item.shard.id: replace(item, object=True)}, {"c"})
    both, alone = (
        Piece(number=0, nodes=nodes, is_element=True, root_digest=b"")
        for nodes in (("a", "c"), ("c",))
    )
    stays = Rebuilt(stripe="s", pieces=(both,))
    goes = Rebuilt(stripe="s", pieces=(both, alone))
    assert () == going_shards({item.shard.id: replace(item, rebuilt=stays)}, {"c"})
    assert (item.shard.id,) == tuple(
        i.shard.id for i in going_shards({item.shard.id: replace(item, rebuilt=goes)}, {"c"})
    )


def test_a_node_that_goes_is_the_last_source_but_for_the_store():
    want = Want(
        shard=None, reason=WantReason.REPAIR, owner="c",
        sources=(Memory("c"), Memory("a"), Object()),
    )  # fmt: skip

    assert (Memory("a"), Object(), Memory("c")) == from_who_stay(want, {"c"}).sources
    assert want == from_who_stay(want, {"b"})


def test_views_name_it_last(cluster):
    has_ended(cluster, "a", "b", "c", replicas=2)
    cluster.hold("b", STEP, 1, 0, world=3, owner="a")
    cluster.report("b")
    go(cluster, "a")
    [want, _] = cluster.view("c").wants

    assert (Memory("b"), Memory("a")) == want.sources


def test_people_are_told_what_a_node_took_with_it(three):
    event = over(three, "c")
    assert ("notice_over", "warning", JOB) == (event.kind, event.severity, event.job)
    assert f"of step {STEP} it alone has the shards of ranks 2" in event.message
    assert {"run": RUN, "step": str(STEP), "ranks": "2"} == event.context

    three.hold("b", STEP, 1, 2, world=3, owner="c")
    three.report("b")
    assert over(three, "c") is None


def test_people_are_told_that_no_step_was_saved_in_time(three):
    says_steps(three, "a", "b", "c")
    announce(three, step=STEP + 1)

    assert "no last step was saved" in over(three, "c").message


def test_of_many_ranks_some_are_named(cluster):
    nodes = [f"n{number}" for number in range(RANKS_NAMED_MAX + 2)]
    has_ended(cluster, *nodes)

    assert "6, 7 and 2 more" in over(cluster, *nodes).message


def over(cluster, *going):
    evidence = gather(RUN, tuple(cluster.nodes.values()), cluster.now_s, cluster.run.stored)
    return notice_over(cluster.run, evidence, cluster.nodes, going, cluster.now_s)


@settings(max_examples=40, deadline=None)
@given(
    going=st.sets(st.sampled_from("abcd")),
    copies=st.sets(st.tuples(st.sampled_from("abcdes"), st.integers(0, 3))),
    rooms=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    replicas=st.integers(0, 2),
)
def test_what_goes_comes_once_to_who_stays_and_has_room(going, copies, rooms, replicas):
    cluster = Cluster()
    has_ended(cluster, *"abcd", replicas=replicas)
    cluster.join("e", "s")
    for node, rank in sorted(copies):
        cluster.hold(node, STEP, 1, rank, world=4, owner="abcd"[rank])
    rooms = dict(zip("abcdes", rooms, strict=True))
    for node in rooms:
        cluster.machines[node].room_bytes = rooms[node] * SEGMENT
    cluster.report(*rooms)
    before = wanted(cluster)
    assert who_go(go(cluster, *going))[len(going) :] == ()

    added = {node: ranks[len(before.get(node, ())) :] for node, ranks in wanted(cluster).items()}
    moved = [(node, rank) for node, ranks in added.items() for rank in ranks]
    gone = left(cluster, *going)
    coming = [rank for node, ranks in before.items() if node not in going for rank in ranks]
    assert len({rank for _, rank in moved}) == len(moved)
    assert {rank for _, rank in moved} <= set(gone) - set(coming)
    assert not any(node in going for node, _ in moved)
    for node, ranks in added.items():
        assert not ranks or len(ranks) + len(before.get(node, ())) <= rooms[node]
    full = all(
        rooms[node] <= len(before.get(node, ())) + len(added.get(node, ()))
        for node in rooms
        if node not in going
    )
    assert full or set(gone) <= {rank for _, rank in moved} | set(coming)
