"""The number of nodes follows how well they are used, within a budget."""

import pytest
from tests.unit.scheduler.clusters import job, nodes, view

from holdfast.errors import InvalidRequestError
from holdfast_services.scheduler.domain.policies.facts import Node
from holdfast_services.scheduler.domain.policies.sizes import Sizing, wanted_nodes

ONE = Node(name="another", gpus=4, price_per_h=8.0)


def test_without_jobs_as_few_as_are_allowed():
    """F103."""
    found = wanted_nodes(view([], nodes(6)), Sizing(node=ONE, nodes_min=2, nodes_max=8))

    assert (2, 0.0) == (found.nodes, found.utility)


def test_the_more_jobs_the_more_nodes():
    """F103."""
    asked = Sizing(node=ONE, nodes_min=1, nodes_max=32)

    counts = [
        wanted_nodes(view([job(f"j{at}") for at in range(n)], nodes(1)), asked).nodes
        for n in (1, 4, 16)
    ]

    assert sorted(counts) == counts
    assert counts[0] < counts[2]


def test_a_number_that_is_used_well_stays():
    """F103: no change while utility is within the window."""
    asked = Sizing(node=ONE, nodes_min=1, nodes_max=32, utility_min=0.2, utility_max=1.2)
    jobs = [job(f"j{at}") for at in range(4)]

    found = [wanted_nodes(view(jobs, nodes(n)), asked) for n in (8, 10)]

    assert [8, 10] == [one.nodes for one in found]
    assert "within the window; 1 to 32 nodes" in found[0].why


def test_a_budget_is_kept():
    """F103: priced nodes."""
    asked = Sizing(node=ONE, nodes_min=1, nodes_max=32, budget_per_h=41.0)

    found = wanted_nodes(view([job(f"j{at}") for at in range(40)], nodes(2)), asked)

    assert 5 == found.nodes
    assert "1 to 5 nodes for 41 per hour" in found.why


def test_of_two_types_each_is_sized_for_itself():
    """F103, G25: what the other one does is not counted."""
    only = frozenset({"big"})
    big = Node(name="another", gpus=4, gpu_type="big")
    jobs = [job("a", gpu_types=only, replicas_max=4), job("b", replicas_max=4)]
    both = (*nodes(1, gpu_type="big"), *nodes(1))

    found = [
        wanted_nodes(view(jobs, both), Sizing(node=one, nodes_min=0, nodes_max=8))
        for one in (big, ONE)
    ]

    assert all(1 <= one.nodes <= 3 for one in found)


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(InvalidRequestError, match="5 to 4 nodes"):
        Sizing(node=ONE, nodes_min=5, nodes_max=4)
    with pytest.raises(InvalidRequestError, match="utility from"):
        Sizing(node=ONE, nodes_min=0, nodes_max=4, utility_min=0.9, utility_max=0.1)
