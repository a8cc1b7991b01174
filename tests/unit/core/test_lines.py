"""Which checkpoints are left behind by restores and rollbacks: the cases a reader should know."""

from __future__ import annotations

from holdfast.core.ids import CheckpointId
from holdfast.core.lines import (
    MOVES_PER_RUN_MAX,
    NOTHING,
    Move,
    leaves,
    moves_of,
    rules_of,
    with_moves,
)
from holdfast.core.node_view import SupersedeRule


def rules(*moves):
    known = ()
    for move in moves:
        known = with_moves(known, move)
    return rules_of(known)


def stands(found, step, generation):
    key = CheckpointId("r7", step, generation)
    return not any(rule.covers(key) for rule in found)


def test_rules_are_bounded_and_never_cover_what_a_run_goes_back_to():
    """P5, M7; defect A5: each restart restores 10 steps further; all it restored must stand."""
    found = ()
    restarts = MOVES_PER_RUN_MAX + 8
    for number in range(1, restarts):
        found = leaves(found, Move(number + 1, 10 * number, number))

    assert len(found) == MOVES_PER_RUN_MAX
    forgotten = restarts - 1 - MOVES_PER_RUN_MAX
    for number in range(1, restarts):
        assert stands(found, 10 * number + 5, number) == (number <= forgotten)
        assert stands(found, 10, number)


def test_restarts_without_progress_leave_one_move():
    moves = ()
    for generation in range(2, 50):
        moves = with_moves(moves, Move(generation, 10, 1))

    assert (Move(49, 10, 1),) == moves


def test_going_back_and_forward_again_brings_the_former_line_back():
    """Steps 60 to 100 of attempt 1 were left for step 50; forward to 100, and what came between."""
    back = (Move(1, 0), Move(2, 50, 1))
    found = rules(*back)
    assert (True, False) == (stands(found, 50, 1), stands(found, 60, 1))

    found = rules(*back, Move(3, 100, 1))

    assert all(stands(found, step, 1) for step in (50, 60, 100))
    assert not stands(found, 110, 1)
    assert not stands(found, 55, 2), "it came from step 50 on the line that is left now"


def test_what_was_left_before_a_line_began_stays_left_when_it_is_taken_up():
    """Attempt 2 had restored step 60 of attempt 1: its steps 70 and later were left before."""
    moves = (Move(1, 0), Move(2, 60, 1), Move(3, 50, 1), Move(4, 200, 2))

    found = rules(*moves)

    assert [True, True, False] == [stands(found, *one) for one in ((60, 1), (200, 2), (70, 1))]


def test_a_fresh_start_leaves_even_step_0_and_can_be_undone():
    moves = (Move(1, 0), Move(2, NOTHING))
    assert not stands(rules(*moves), 0, 1)

    assert stands(rules(*moves, Move(3, 40, 1)), 40, 1)


def test_of_two_moves_of_one_generation_the_stricter_counts():
    """Manifests whose attempt's beginning is unknown claim only what is certain, each its own."""
    assert rules(Move(5, 30, 5), Move(5, 20, 5)) == rules(Move(5, 20, 5))


def test_rules_of_a_catalogue_that_knew_no_moves_go_on():
    old = (SupersedeRule(after_step=10, below_generation=2),)

    assert rules_of(moves_of(old)) == old
