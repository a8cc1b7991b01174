"""Laws of every plan, whatever the policy, the cluster and the jobs: drawn anew each time."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.clusters import job, nodes, running, view

from holdfast.goodput.batches import BatchLimits
from holdfast.goodput.efficiency import GradientNoise
from holdfast.goodput.fit import Measured
from holdfast.goodput.profile import profile_of
from holdfast_services.scheduler.domain.policies.facts import Node, NodeState, View, Work
from holdfast_services.scheduler.domain.policies.fifo import Fifo
from holdfast_services.scheduler.domain.policies.plan import plan, plan_arrivals
from holdfast_services.scheduler.domain.policies.pollux import Pollux
from holdfast_services.scheduler.domain.policies.price import Price
from holdfast_services.scheduler.domain.policies.sia import Sia
from holdfast_services.scheduler.domain.policies.starving import Starvation

ALL = [Price(), Pollux(), Sia(), Fifo()]
each_policy = pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)


@st.composite
def clusters(draw):
    kinds = draw(st.lists(st.sampled_from([("gpu", 4), ("big", 8), ("gpu", 2)]), max_size=7))
    return tuple(
        Node(
            name=f"n{at}",
            gpus=gpus,
            gpu_type=kind,
            spot=draw(st.booleans()),
            state=draw(st.sampled_from([NodeState.UP] * 4 + [NodeState.LOST, NodeState.DRAINING])),
        )
        for at, (kind, gpus) in enumerate(kinds)
    )


@st.composite
def jobs(draw, name):
    least = draw(st.sampled_from([1, 1, 1, 2, 5]))
    return job(
        name,
        seconds=draw(st.sampled_from([None, 1.0, 600.0, 36_000.0, 1e7])),
        seen=draw(st.sampled_from([0, 1, 4, 64])),
        submitted_s=draw(st.sampled_from([0.0, 30.0, 60.0])),
        replicas_min=least,
        replicas_max=least + draw(st.sampled_from([0, 1, 7, 60])),
        gpu_types=draw(st.sampled_from([None, None, frozenset({"big"})])),
        owner=draw(st.sampled_from(["", "team"])),
        priority=draw(st.integers(-2, 2)),
        preemptible=draw(st.sampled_from([True, True, False])),
        noise=draw(st.sampled_from([None, GradientNoise(sqr=1.0, var=200.0)])),
    )


@st.composite
def views(draw):
    count = draw(st.integers(0, 12))
    quotas = draw(st.sampled_from([{}, {"team": 5}]))
    them = [draw(jobs(f"j{at}")) for at in range(count)]
    return view(them, draw(clusters()), quotas=quotas)


def check(before: View, found) -> None:
    """What is so of every plan."""
    by_name = {node.name: node for node in before.nodes}
    used, several, owned = Counter(), Counter(), Counter()
    for one in before.jobs:
        has = found.allocations.get(one.name, ())
        assert found.reasons[one.name]
        if not has:
            continue
        total = sum(gpus for _, gpus in has)
        assert one.replicas_min <= total <= one.replicas_max
        assert one.name not in found.refused
        assert len({by_name[name].gpu_type for name, _ in has}) == 1
        assert one.gpu_types is None or by_name[has[0][0]].gpu_type in one.gpu_types
        assert len(dict(has)) == len(has)
        for name, gpus in has:
            assert gpus > 0
            assert by_name[name].state is NodeState.UP
            assert one.preemptible or not by_name[name].spot
            used[name] += gpus
            several[name] += len(has) > 1
        owned[one.owner] += total
    assert all(used[name] <= by_name[name].gpus for name in used), "over capacity"
    assert all(count <= 1 for count in several.values()), "two share the network of a node"
    assert all(owned[owner] <= quota for owner, quota in before.quotas.items())


@each_policy
@settings(max_examples=25)
@given(before=views(), seed=st.integers(0, 99))
def test_every_plan_keeps_the_bounds(policy, before, seed):
    """F95, F98: also of a view in which an earlier plan was carried out and nodes have gone."""
    found = plan(before, policy, 60.0)
    check(before, found)
    after = running(before, found, 60.0)
    lost = random.Random(seed).choice([None, *before.nodes])
    left = tuple(
        replace(node, state=NodeState.LOST) if node is lost else node for node in before.nodes
    )
    again = plan(replace(after, nodes=left), policy, 120.0)
    check(replace(after, nodes=left), again)
    for one in after.jobs:
        kept = one.allocation and (lost is None or lost.name not in dict(one.allocation))
        if kept and not one.preemptible:
            assert one.allocation == again.allocations[one.name], "it was pinned"
    check(after, plan_arrivals(after, policy, 120.0))


@each_policy
@settings(max_examples=25)
@given(before=views(), seed=st.integers(0, 99))
def test_the_order_in_which_facts_are_told_changes_nothing(policy, before, seed):
    drawn = random.Random(seed)
    them, those = list(before.jobs), list(before.nodes)
    drawn.shuffle(them)
    drawn.shuffle(those)

    first = plan(before, policy, 60.0)

    assert first == plan(replace(before, jobs=tuple(them), nodes=tuple(those)), policy, 60.0)
    assert first == plan(before, policy, 60.0)


NUMBERS = st.sampled_from([0.0, -1.0, 1e-300, 1.0, 1e300, math.inf, math.nan])


@each_policy
@settings(max_examples=25)
@given(
    points=st.lists(
        st.builds(
            Measured,
            nodes=st.sampled_from([-1, 0, 1, 2, 2**60]),
            replicas=st.sampled_from([-1, 0, 1, 8, 2**60]),
            local_batch=st.sampled_from([-1, 0, 1, 64, 2**60]),
            compute_s=NUMBERS,
            step_s=NUMBERS,
        ),
        max_size=5,
    ),
    sqr=st.sampled_from([0.0, 1e-300, 1.0, 1e300]),
    var=st.sampled_from([0.0, 1e-300, 1.0, 1e300]),
    declared=st.sampled_from([0.0, 1.0, 1e18]),
)
def test_absurd_hints_of_one_job_change_nothing_for_those_that_ask_little(
    policy, points, sqr, var, declared
):
    """F106: what cannot be so is not a fact; what is only odd is borne."""
    believed = [point for point in points if point.is_believable()]
    profiles = {"gpu": profile_of(believed)} if believed else {}
    odd = job(
        "odd",
        profiles=profiles,
        noise=GradientNoise(sqr=sqr, var=var),
        work=Work(declared=declared),
        batches=BatchLimits(initial=1, maximum=2**40, accumulation=True),
    )
    plain = [job(f"j{at}", replicas_max=2) for at in range(3)]

    found = plan(view([odd, *plain], nodes(4)), policy, 60.0)

    check(view([odd, *plain], nodes(4)), found)
    assert {"j0", "j1", "j2"} <= found.allocations.keys()


@each_policy
@settings(max_examples=5)
@given(
    least=st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=8),
    gpus=st.sampled_from([4, 8]),
)
def test_nobody_starves_beyond_the_bound(policy, least, gpus):
    """The bound that the module ``starving`` states; others come before them for ever."""
    rule, round_s = Starvation(starves_s=600.0, keeps_s=120.0), 60.0
    long = [job(f"l{at}", seconds=1e7, replicas_min=one) for at, one in enumerate(least)]
    short = [job(f"s{at}", seconds=30.0, priority=3) for at in range(8)]
    now = view([*long, *short], nodes(gpus // 4))
    ahead, each, whole = sum(least) + 8, max(least), gpus
    spans = 2 + ahead / max(1, whole // 2 - each + 1)
    bound_s = rule.starves_s + spans * (rule.keeps_s + round_s)
    for at in range(int(bound_s / round_s) + 30):
        now = running(now, plan(now, policy, at * round_s, rule), at * round_s)
        waited_s = [at * round_s - one.since_s for one in now.jobs if not one.allocation]
        assert max(waited_s, default=0.0) <= bound_s
