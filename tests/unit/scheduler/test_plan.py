"""What a plan gives to whom, policy by policy, and what it says about it."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.clusters import job, nodes, running, view

from holdfast.errors import InvalidRequestError
from holdfast.goodput.batches import BatchLimits
from holdfast_services.scheduler.domain.policies.facts import (
    Family,
    MoveCost,
    Node,
    NodeState,
    Work,
)
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.plan import plan, plan_arrivals
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia

ALL = [Price(), Pollux(), Sia(), Fifo()]
each_policy = pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)


def gpus(plan):
    return {name: sum(count for _, count in has) for name, has in plan.allocations.items()}


@each_policy
def test_one_job_has_the_cluster_for_itself(policy):
    """F98: whole nodes."""
    found = plan(view([job("a")], nodes(4)), policy, 0.0)

    assert {"a": 16} == gpus(found)
    assert (("gpu000", 4), ("gpu001", 4), ("gpu002", 4), ("gpu003", 4)) == found.allocations["a"]
    assert "16" in found.reasons["a"]


@each_policy
def test_a_job_of_which_nothing_is_known_begins_with_its_least(policy):
    """F100."""
    found = plan(view([job("a", seen=0), job("b", seen=0, replicas_min=2)], nodes(4)), policy, 0.0)

    assert {"a": 1, "b": 2} == gpus(found)


@each_policy
def test_growth_is_limited_to_twice_what_was_measured(policy):
    """F100."""
    assert {"a": 4} == gpus(plan(view([job("a", seen=2)], nodes(4)), policy, 0.0))


@each_policy
def test_a_family_is_known_by_what_others_of_it_have_measured(policy):
    fresh = job("b", seen=0, family="net", noise=None)
    old = job("a")
    families = {"net": Family(profiles=old.profiles, noise=old.noise)}

    found = plan(view([fresh], nodes(2), families=families), policy, 0.0)

    assert {"b": 8} == gpus(found)


@each_policy
def test_nothing_is_moved_for_nothing(policy):
    """F101: a second plan of the same facts changes nothing."""
    before = view([job(f"j{at}", seconds=3000.0 + at) for at in range(9)], nodes(4))
    found = plan(before, policy, 0.0)
    after = running(before, found)

    assert found.allocations == plan(after, policy, 60.0).allocations


@each_policy
def test_who_may_not_be_moved_keeps_what_it_has(policy):
    """F95, F98."""
    before = view([job("a", preemptible=False), job("b")], nodes(2))
    has = replace(before.jobs[0], allocation=(("gpu000", 3),))

    found = plan(replace(before, jobs=(has, before.jobs[1])), policy, 0.0)

    assert (("gpu000", 3),) == found.allocations["a"]
    assert "keeps its 3 GPUs: it is not preemptible" == found.reasons["a"]
    assert 4 <= gpus(found)["b"] <= 5


@each_policy
def test_who_may_not_be_moved_does_not_begin_on_a_spot_node(policy):
    """F98: spot nodes are last, and not at all for these."""
    found = plan(view([job("a", preemptible=False)], nodes(2, spot=True)), policy, 0.0)

    assert {} == found.allocations
    assert "that are not spot, since it is not preemptible: there are none" in found.refused["a"]


@each_policy
def test_spot_nodes_are_last(policy):
    spot = tuple(replace(node, name=f"a{node.name}", spot=True) for node in nodes(2))

    found = plan(view([job("a", replicas_max=4)], (*spot, *nodes(2))), policy, 0.0)

    assert (("gpu000", 4),) == found.allocations["a"]


@each_policy
@pytest.mark.parametrize("state", [NodeState.LOST, NodeState.DRAINING])
def test_a_node_that_goes_is_left(policy, state):
    """F104: its job moves, whatever the move costs."""
    first, *others = nodes(3)
    has = job("a", replicas_max=4, allocation=(("gpu000", 4),), cost=MoveCost(restart_s=80_000.0))

    found = plan(view([has], (replace(first, state=state), *others)), policy, 0.0)

    assert found.allocations["a"]
    assert "gpu000" not in dict(found.allocations["a"])


@each_policy
def test_quotas_hold(policy):
    """F95: also where the owner's jobs would pay more than all others."""
    mine = [job(f"a{at}", owner="team", seconds=600.0) for at in range(4)]
    before = view([*mine, job("b", seconds=1e6)], nodes(4), quotas={"team": 6})

    found = plan(before, policy, 0.0)

    assert 6 >= sum(count for name, count in gpus(found).items() if name != "b")
    assert 8 <= gpus(found)["b"]


@each_policy
def test_two_types_of_gpus_are_shared_out(policy):
    """G25: a job that may run on one of them only leaves the other to the rest."""
    only = frozenset({"big"})
    jobs = [job("a", gpu_types=only, replicas_max=8), job("b", replicas_max=8)]

    found = plan(view(jobs, (*nodes(2, gpu_type="big"), *nodes(2))), policy, 0.0)

    assert {"a": 8, "b": 8} == gpus(found)
    assert {"big000", "big001"} == set(dict(found.allocations["a"]))


def test_a_job_moves_to_as_many_gpus_of_another_type():
    """G25: what it may have now lies in another pool."""
    has = job("a", gpu_types=frozenset({"big"}), replicas_max=4, allocation=(("gpu000", 4),))

    found = plan(view([has], (*nodes(1, gpu_type="big"), *nodes(1))), Price(), 0.0)

    assert (("big000", 4),) == found.allocations["a"]


@each_policy
def test_a_job_that_can_never_run_is_refused_with_the_sum(policy):
    """F107."""
    small = BatchLimits(initial=64, maximum=512, local_min=64)
    asked = [
        job("wide", replicas_min=9),
        job("kind", gpu_types=frozenset({"h100"})),
        job("thin", replicas_min=9, replicas_max=64, batches=small),
        job("over", owner="team", replicas_min=4),
    ]

    found = plan(view(asked, nodes(2), quotas={"team": 3}), policy, 0.0)

    assert {
        "wide": "needs 9 GPUs of one kind: there are 2 nodes x 4 = 8 of gpu",
        "kind": "needs 1 GPUs of h100 of one kind: there are none",
        "thin": "needs 9 GPUs, and its batch of at most 512 samples gives 64 each to 8",
        "over": "needs 4 GPUs, and the quota of team is 3",
    } == found.refused
    assert {name: f"refused: {why}" for name, why in found.refused.items()} == found.reasons
    assert {} == plan(view(asked[:2], ()), policy, 0.0).refused


@each_policy
def test_odd_bounds_lie_on_whole_nodes_and_a_rest(policy):
    """F98: six of four each are four and two."""
    found = plan(view([job("a", replicas_min=6, replicas_max=6)], nodes(2)), policy, 0.0)

    assert [4, 2] == [count for _, count in found.allocations["a"]]


@each_policy
def test_arrivals_are_placed_at_once_and_move_nobody(policy):
    """F101."""
    before = view([job("a", replicas_max=8)], nodes(3))
    before = running(before, plan(before, policy, 0.0))
    later = replace(before, jobs=(*before.jobs, job("new", seen=0, submitted_s=5.0)))

    found = plan_arrivals(later, policy, 5.0)

    assert before.jobs[0].allocation == found.allocations["a"]
    assert {"a": 8, "new": 1} == gpus(found)


@each_policy
def test_without_nodes_all_wait(policy):
    found = plan(view([job("a"), job("b")], ()), policy, 0.0)

    assert ({}, {"a", "b"}) == (found.allocations, set(found.reasons))


def test_a_short_job_comes_before_a_long_one():
    """Price: one GPU for two that want it."""
    found = plan(view([job("long", seconds=1e6), job("short")], nodes(1, gpus=1)), Price(), 0.0)

    assert {"short": 1} == gpus(found)
    assert "waits: 1 GPUs are worth" in found.reasons["long"]
    assert "(1 of 2 from the longest)" in found.reasons["long"]


def test_equal_jobs_do_not_take_turns():
    """Price, hysteresis: for an hour of rounds the one that runs goes on."""
    now = view([job("a"), job("b")], nodes(1, gpus=1))
    for minute in range(50):
        found = plan(now, Price(), 60.0 * minute)
        assert {"a": 1} == gpus(found)
        now = running(now, found, 60.0 * minute)


def test_priority_is_worth_more_than_length():
    """Price, F95."""
    jobs = [job("long", seconds=36_000.0, priority=5), job("short")]

    assert {"long": 1} == gpus(plan(view(jobs, nodes(1, gpus=1)), Price(), 0.0))


def test_a_move_that_does_not_pay_is_not_made():
    """F99: what the same job does if moves are cheap."""
    before = job("a", seconds=2000.0, allocation=(("gpu000", 4),))
    dear, cheap = MoveCost(restart_s=400.0), MoveCost(restart_s=5.0)

    found = [
        gpus(plan(view([replace(before, cost=cost)], nodes(2)), Price(), 0.0))
        for cost in (dear, cheap)
    ]

    assert [{"a": 4}, {"a": 8}] == found


def test_a_move_is_cheaper_where_the_checkpoint_lies():
    """F99: local to two nodes, so that it grows onto them and not further."""
    cost = MoveCost(restore_s=500.0, restore_local_s=1.0)
    has = job("a", allocation=(("gpu000", 4),), cost=cost, held_by=frozenset({"gpu000", "gpu002"}))

    found = plan(view([has], nodes(4)), Price(), 0.0)

    assert (("gpu000", 4), ("gpu002", 4)) == found.allocations["a"]


@each_policy
def test_who_waits_longest_of_those_that_starve_comes_first(policy):
    """On half of the GPUs; then they keep them for a while, and are asked again."""
    short = [job(f"s{at}", seconds=300.0) for at in range(4)]
    long = [job(f"l{at}", seconds=1e7, since_s=-4000.0 + at) for at in range(4)]
    before = view([*long, *short], nodes(1, gpus=4))

    found = plan(before, policy, 0.0)
    after = plan(running(before, found), policy, 300.0)

    assert "had waited for 3600 s: served first, with the least" == found.reasons["l0"]
    assert "had waited" in found.reasons["l1"]
    assert "had waited" not in found.reasons["l2"]
    assert [found.allocations[name] for name in ("l0", "l1")] == [
        after.allocations[name] for name in ("l0", "l1")
    ]
    assert "keeps its 1 GPUs: it had starved before" == after.reasons["l0"]


def test_a_neighbour_moves_where_what_is_free_lies_apart():
    """Not a larger one, and not one whose move takes longer than it is worth."""
    here, there = (("gpu000", 1),), (("gpu001", 3),)
    grows = job("grows", allocation=here, replicas_max=2)
    small = job("small", allocation=here, replicas_max=1)
    rest = [job("two", allocation=(("gpu000", 2),), replicas_min=2, replicas_max=2),
            job("three", allocation=there, replicas_min=3, replicas_max=3)]  # fmt: skip

    found = plan(view([grows, small, *rest], nodes(2)), Price(), 0.0).allocations

    assert {"grows": (("gpu000", 2),), "small": (("gpu001", 1),)}.items() <= found.items()
    assert (rest[0].allocation, rest[1].allocation) == (found["two"], found["three"])

    slow = replace(small, cost=MoveCost(restart_s=3600.0))
    found = plan(view([grows, slow, *rest], nodes(2)), Price(), 0.0).allocations
    assert slow.allocation == found["small"]


def test_who_starves_displaces_the_fewest_gpus():
    """The wide job, on three nodes of four, goes on where it is."""
    wide = job("wide", allocation=tuple((f"gpu00{at}", 4) for at in range(3)), replicas_max=12)
    small = job("small", allocation=(("gpu003", 4),), replicas_max=4)
    starved = job("starved", seconds=1e7, since_s=-4000.0, replicas_max=1)

    found = plan(view([wide, small, starved], nodes(4)), Price(), 0.0)

    assert (("gpu003", 1),) == found.allocations["starved"]
    assert wide.allocation == found.allocations["wide"]


def test_undeclared_work_is_taken_from_the_family():
    """Price: what jobs of the family took in all."""
    unknown, declared = job("a", seconds=None, family="long"), job("b")
    families = {"long": Family(work=1e9)}
    before = view([unknown, declared], nodes(1, gpus=1), families=families)

    assert {"b": 1} == gpus(plan(before, Price(), 0.0))
    assert {"a": 1} == gpus(plan(replace(before, families={}), Price(), 0.0))


def test_fifo_goes_by_priority_then_by_age():
    """F102."""
    jobs = [job("old"), job("new", submitted_s=9.0), job("first", submitted_s=9.0, priority=1)]

    assert {"first": 1} == gpus(plan(view(jobs, nodes(1, gpus=1)), Fifo(), 10.0))
    assert {"old": 1} == gpus(plan(view(jobs[:2], nodes(1, gpus=1)), Fifo(), 10.0))


def test_fifo_squeezes_who_has_more_than_the_least():
    """F102."""
    before = view([job("a")], nodes(1))
    before = running(before, plan(before, Fifo(), 0.0))
    later = replace(before, jobs=(*before.jobs, job("b", submitted_s=5.0, replicas_min=2)))

    assert {"a": 2, "b": 2} == gpus(plan(later, Fifo(), 5.0))


def test_fifo_fills_in_behind_a_job_that_does_not_fit():
    """F102: the small one gives way once there is room for the one before it."""
    pinned = job("p", preemptible=False, allocation=(("gpu000", 2),))
    jobs = [pinned, job("wide", replicas_min=4, replicas_max=4), job("small", submitted_s=1.0)]
    small_cluster = nodes(1)

    assert {"p": 2, "small": 2} == gpus(plan(view(jobs, small_cluster), Fifo(), 2.0))
    assert {"wide": 4} == gpus(plan(view(jobs[1:], small_cluster), Fifo(), 2.0))


def test_fifo_does_not_fill_in_for_ever_with_what_cannot_be_taken_off():
    """F102: once the wide one has waited for ten minutes nothing pinned begins behind it."""
    pinned = job("p", preemptible=False, allocation=(("gpu000", 2),))
    wide = job("wide", replicas_min=4, replicas_max=4)
    new = job("new", submitted_s=1.0, preemptible=False)

    early, late = (
        gpus(plan(view([pinned, wide, new], nodes(1)), Fifo(), now)) for now in (60.0, 700.0)
    )

    assert {"p": 2, "new": 2} == early
    assert {"p": 2} == late


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: job("a", replicas_min=5, replicas_max=4), "replicas 5 to 4"),
        (lambda: job("a", priority=1000), "priority 1000"),
        (lambda: Work(done=float("nan")), "done samples is nan"),
        (lambda: Work(declared=-1.0), "declared samples is -1.0"),
        (lambda: MoveCost(save_s=1e300), "save_s is 1e\\+300"),
        (lambda: Node(name="n", gpus=1 << 40), "a node of 1099511627776 GPUs"),
        (lambda: view([job("a"), job("a")], ()), "job a is there twice"),
    ],
)
def test_facts_that_cannot_be_are_refused(make, said):
    """F106, F107."""
    with pytest.raises(InvalidRequestError, match=said):
        make()
