"""Rounds of which the scheduler says who takes part: exactly those, after a saved step."""

import pytest
from tests.unit.metadata.launchers import Cluster

from holdfast.core import allocations
from holdfast.core.allocations import Allocation, Share
from holdfast.errors import InvalidRequestError, StaleGenerationError
from holdfast_services.metadata.domain import allocated, round_view, rounds
from holdfast_services.metadata.domain.launch import EndReason
from holdfast_services.metadata.domain.rounds import Allocated, Gone


def allocation(number, *, least=0, **ranks):
    shares = (
        Share(node=node, ranks=count, devices=tuple(range(count))) for node, count in ranks.items()
    )
    return Allocation(number=number, ranks_min=least, shares=tuple(shares))


@pytest.fixture
def cluster():
    """Nodes aa and bb train on two ranks each; cc has no launcher yet."""
    made = Cluster(nodes_min=1, nodes_max=8, allocated=True)
    made.feed(Allocated(allocation(1, aa=2, bb=2)))
    made.say("aa")
    made.say("bb")
    made.follow("aa", "bb")
    return made


def members(cluster):
    return {member.node: member.ranks for member in cluster.launch.members}


def test_no_round_begins_before_somebody_says_who_takes_part():
    made = Cluster(nodes_min=1, nodes_max=1, allocated=True, shrink_after_s=0.0)
    made.say("aa")
    made.tick(100.0)

    assert not made.launch.on
    assert "nobody has said yet" in made.view("aa").waiting


def test_a_round_begins_with_all_of_the_allocation_and_with_nobody_else():
    made = Cluster(nodes_min=1, nodes_max=8, allocated=True)
    made.say("cc")
    made.say("aa")
    made.feed(Allocated(allocation(7, aa=1, bb=3)))
    made.tick(1000.0)
    assert not made.launch.on, "a part of it is not enough"
    assert "waiting for the launchers of bb" in round_view.awaited(made.launch)

    made.say("bb")
    assert {"aa": 1, "bb": 3} == members(made)
    assert 7 == made.launch.allocated
    place = made.place("bb")
    assert (3, (0, 1, 2), 1, 4) == (
        place.ranks, place.devices, place.first_rank, place.world_size,
    )  # fmt: skip
    assert made.view("cc").ending.released
    assert not allocated.begun(made.launch)
    made.follow("aa", "bb")
    assert allocated.begun(made.launch)


def test_growth_ends_the_round_after_a_save_once_the_newcomer_is_here(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2, cc=1)))
    cluster.tick(saved=True)
    assert cluster.launch.number == 1, "training goes on while it starts"

    cluster.say("cc")
    cluster.tick(saved=True)
    assert cluster.launch.end is None, "and while it imports what its ranks need"
    cluster.say("cc", warm=True)
    assert cluster.launch.end.reason is EndReason.RESCALE
    assert cluster.launch.number == 1
    cluster.tick(saved=True)
    assert {"aa": 2, "bb": 2, "cc": 1} == members(cluster)
    assert 2 == cluster.launch.allocated


def test_a_newcomer_that_never_gets_warm_is_not_waited_for_for_ever(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2, cc=1)))
    cluster.say("cc")
    cluster.tick(allocated.WARM_S_MAX)

    assert cluster.launch.end.reason is EndReason.RESCALE


def test_who_is_left_out_trains_until_the_step_is_saved_and_is_released_then(cluster):
    cluster.feed(Allocated(allocation(2, bb=1)))
    assert cluster.view("aa").ending is None
    assert cluster.place("aa") is not None

    cluster.tick(saved=True)
    assert {"bb": 1} == members(cluster)
    assert cluster.view("aa").ending.released
    assert cluster.view("bb").ending is None


def test_the_same_nodes_under_another_number_change_no_round(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2)))

    assert cluster.launch.end is None
    assert cluster.launch.number == 1
    assert cluster.launch.allocated == 2


def test_the_wish_is_taken_back_if_the_newcomer_goes_again(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2, cc=1)))
    cluster.say("cc", warm=True)
    assert rounds.end_wanted(cluster.launch)
    cluster.feed(Gone(frozenset({"cc" * 16})))

    assert not rounds.end_wanted(cluster.launch)
    cluster.tick(taken_back=True)
    assert cluster.launch.end is None
    assert cluster.launch.number == 1


def test_an_older_allocation_changes_nothing_and_the_same_one_does_no_harm(cluster):
    before = cluster.launch
    cluster.feed(Allocated(allocation(1, aa=2, bb=2)))
    assert before == cluster.launch

    cluster.feed(Allocated(allocation(5, aa=2)))
    with pytest.raises(StaleGenerationError, match="has allocation 5"):
        cluster.feed(Allocated(allocation(4, aa=2, bb=2)))
    with pytest.raises(StaleGenerationError, match="not older than 5"):
        cluster.feed(Allocated(allocation(5, bb=2)))


def test_an_empty_allocation_has_ranks_save_and_end(cluster):
    cluster.feed(Allocated(allocation(2)))

    assert cluster.view("aa").stop
    assert cluster.view("bb").stop
    cluster.say("aa", left=True)
    cluster.say("bb", left=True)
    assert not cluster.launch.on
    late = cluster.say("cc")
    assert cluster.view("cc").ending.released, late


def test_a_lost_node_ends_the_round_and_enough_others_go_on_after_a_while(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2, least=2)))
    cluster.feed(Gone(frozenset({"bb" * 16})))
    cluster.say("aa", port=9000)
    assert not cluster.launch.on, "who decides about nodes may do so first"

    cluster.tick(31.0)
    assert {"aa": 2} == members(cluster)
    cluster.follow("aa")
    cluster.say("bb", port=9001, warm=True)
    assert cluster.launch.end.reason is EndReason.RESCALE
    cluster.tick(saved=True)
    assert {"aa": 2, "bb": 2} == members(cluster)


def test_a_lost_node_is_waited_for_where_the_others_are_not_enough(cluster):
    cluster.feed(Allocated(allocation(2, aa=2, bb=2, least=3)))
    cluster.feed(Gone(frozenset({"bb" * 16})))
    cluster.tick(10_000.0)

    assert not cluster.launch.on


def test_a_node_is_left_out_only_if_what_is_left_of_the_allocation_is_enough(cluster):
    """Else nothing could begin for an hour; what the script does everywhere ends the launch."""
    for _ in range(2):
        cluster.fail("bb", "ValueError: bad batch", step=-1)
        cluster.tick(31.0)
        cluster.follow("aa", "bb")

    assert not any(one.left_out for one in cluster.launch.launchers)
    assert cluster.launch.ending.code == 1
    assert not cluster.launch.ending.outside


def test_a_new_launch_of_the_job_has_the_allocation(cluster):
    cluster.say("aa", left=True)
    cluster.say("bb", left=True)
    cluster.say("dd", node="aa")

    assert cluster.launch.allocation == allocation(1, aa=2, bb=2)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (allocation(0, a=1), "number 0"),
        (allocation(1, a=0), "0 ranks"),
        (Allocation(number=1, ranks_min=-1), "ranks_min"),
        (Allocation(number=1, shares=(Share(node="../a", ranks=1),)), "node name"),
        (
            Allocation(number=1, shares=(Share(node="a", ranks=1), Share(node="a", ranks=1))),
            "two shares",
        ),
        (
            Allocation(number=1, shares=(Share(node="a", ranks=2, devices=(1, 1)),)),
            "2 ranks and 1 devices",
        ),
        (Allocation(number=1, shares=(Share(node="a", ranks=1, devices=(-1,)),)), "a device"),
    ],
)
def test_an_allocation_that_makes_no_sense_is_refused(bad, said):
    with pytest.raises(InvalidRequestError, match=said):
        allocations.check(bad)
