"""``core.budget``: the sum that a refusal writes out (P8)."""

import pytest

from holdfast.core.budget import (
    checked_slots,
    memory_need,
    restored_bytes_of_part,
    saving_slots,
    shortfall,
    slots_per_rank,
)
from holdfast.core.protection import Copies, Parity
from holdfast.errors import InvalidRequestError


def test_a_ddp_node_needs_slots_copies_and_the_rest_of_the_checkpoint():
    """P8: slots x (own + incoming) + what must be fetched to restore."""
    need = memory_need(own_bytes=100, restored_bytes=400, protection=Copies(1), nodes_count=4)

    assert (2, 100, 100, 200) == (
        need.slots,
        need.own_bytes,
        need.incoming_bytes,
        need.restore_bytes,
    )
    assert 2 * (100 + 100) + 200 == need.total_bytes


def test_replicas_are_cut_to_the_other_nodes():
    """F54: one node has no peers and needs no room for copies."""
    assert (
        0
        == memory_need(
            own_bytes=7, restored_bytes=7, protection=Copies(3), nodes_count=1
        ).incoming_bytes
    )
    assert (
        0
        == memory_need(
            own_bytes=7, restored_bytes=7, protection=Copies(3), nodes_count=0
        ).incoming_bytes
    )
    assert (
        7
        == memory_need(
            own_bytes=7, restored_bytes=14, protection=Copies(3), nodes_count=2
        ).incoming_bytes
    )


def test_what_a_node_holds_anyway_is_not_counted_again():
    assert (
        0
        == memory_need(
            own_bytes=5, restored_bytes=8, protection=Copies(1), nodes_count=2
        ).restore_bytes
    )


def test_the_text_is_the_sum_written_out():
    need = memory_need(
        own_bytes=1 << 30, restored_bytes=4 << 30, protection=Copies(1), nodes_count=4
    )

    text = "2 slots x 1 GiB own + 2 slots x 1 GiB incoming copies + 2 GiB to restore = 6 GiB"
    assert text == str(need)


def test_the_text_leaves_out_what_is_not_needed():
    need = memory_need(own_bytes=1 << 30, restored_bytes=0, protection=Copies(1), nodes_count=1)

    assert "2 slots x 1 GiB own = 2 GiB" == str(need)


def test_a_node_of_ranks_with_a_part_each_has_theirs_beside_its_own_and_the_copies():
    part = {"own_bytes": 10, "loaded_bytes": 10, "replicas": 1}

    assert 30 == restored_bytes_of_part(**part, whole_bytes=1000)
    assert 25 == restored_bytes_of_part(**part, whole_bytes=25)


def test_a_refusal_names_the_sum_the_budget_and_what_to_do():
    need = memory_need(own_bytes=1 << 30, restored_bytes=0, protection=Copies(0), nodes_count=1)

    assert shortfall(need, 1 << 30) == (
        "2 slots x 1 GiB own = 2 GiB, but the arena's budget is 1 GiB; raise HOLDFAST_BUDGET, "
        "lower replicas, or use more nodes"
    )
    assert "= 2 GiB, beside a, but the arena's budget is 3 B; do b, raise " in shortfall(
        need, 3, beside="a", advice="do b, "
    )


@pytest.mark.parametrize(
    ("persist", "asked", "slots"),
    [(False, 0, 2), (True, 0, 3), (False, 4, 4), (True, 2, 2), (True, 16, 16)],
)
def test_a_rank_has_the_slots_that_it_asks_for_or_as_many_as_it_needs(persist, asked, slots):
    """F43."""
    assert slots == slots_per_rank(persist=persist, asked=checked_slots(asked))


@pytest.mark.parametrize("asked", [1, 17, -1])
def test_slots_that_no_rank_can_have_are_refused_with_the_bounds(asked):
    with pytest.raises(InvalidRequestError, match=f"slots={asked} must be 2 to 16"):
        checked_slots(asked)


def test_an_object_tier_costs_one_slot_more_of_its_own_and_no_copies():
    """P8, 4.7: what drains is kept by its owner beside the newest and the one being written."""
    sizes = {"own_bytes": 100, "restored_bytes": 200, "protection": Copies(2), "nodes_count": 4}
    plain = memory_need(**sizes, slots=slots_per_rank(persist=False))
    more = memory_need(**sizes, slots=slots_per_rank(persist=True), persist=True)

    assert (2, 2) == (plain.slots, plain.incoming_slots)
    assert (3, 2) == (more.slots, more.incoming_slots)
    assert 100 == more.total_bytes - plain.total_bytes


@pytest.mark.parametrize(
    ("slots", "persist", "saving"),
    [(2, False, 2), (3, True, 2), (2, True, 2), (5, True, 4), (4, False, 4)],
)
def test_copies_have_as_many_slots_as_steps_that_do_not_drain(slots, persist, saving):
    """F43: so no step waits at its owner that a backup may not have room for."""
    sizes = {"own_bytes": 10, "restored_bytes": 0, "protection": Copies(1), "nodes_count": 2}

    assert saving == saving_slots(slots, persist=persist)
    assert saving == memory_need(**sizes, slots=slots, persist=persist).incoming_slots


def test_parity_is_in_the_sum_in_the_same_words():
    """G4: elements cost m/k of the state, rounded up by the real groups, and serve no restore."""
    need = memory_need(
        own_bytes=8 << 30, restored_bytes=64 << 30, protection=Parity(4, 2), nodes_count=8,
        shards_count=8,
    )  # fmt: skip

    assert need.incoming_bytes == 7 << 30
    assert need.restore_bytes == 56 << 30
    assert "2 slots x 7 GiB incoming parity elements" in str(need)
