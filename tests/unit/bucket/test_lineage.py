"""What stands and what is superseded, from manifests alone (P6, F68)."""

from __future__ import annotations

from tests.unit.bucket.folders import make

from holdfast.bucket.lineage import newest, rules
from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import SupersedeRule


def manifests(*rows):
    """Rows of (step, generation, parent): parent is (step, generation) or None."""
    return [
        make(
            None,
            CheckpointId("r7", step, generation),
            parent=CheckpointId("r7", *parent) if parent else None,
        ).manifest
        for step, generation, parent in rows
    ]


def chosen(*rows):
    found = newest(manifests(*rows))
    return found and (found.checkpoint.step, found.checkpoint.generation)


def test_the_greatest_step_of_one_attempt_is_the_newest():
    assert chosen((10, 1, None), (30, 1, None), (20, 1, None)) == (30, 1)


def test_what_a_restore_left_behind_is_not_chosen():
    """Generation 2 restored step 10: steps 20 and 30 of generation 1 are another history."""
    assert chosen((10, 1, None), (20, 1, None), (30, 1, None), (15, 2, (10, 1))) == (15, 2)


def test_what_a_restore_went_on_from_stands():
    assert chosen((10, 1, None), (30, 1, None), (40, 2, (30, 1))) == (40, 2)
    assert (SupersedeRule(after_step=30, below_generation=2),) == rules(manifests((40, 2, (30, 1))))


def test_a_superseded_manifest_still_says_what_it_superseded():
    """Generation 3 goes back before generation 2's restore; what 2 voided stays void."""
    rows = [(10, 1, None), (90, 1, None), (50, 2, (10, 1)), (20, 3, (10, 1))]

    assert chosen(*rows) == (20, 3)
    assert chosen(*rows[:3]) == (50, 2)


def test_an_attempt_that_began_from_nothing_supersedes_older_ones():
    assert chosen((90, 1, None), (5, 2, None)) == (5, 2)


def test_one_step_saved_by_two_generations_is_that_of_the_newer():
    assert chosen((10, 1, None), (20, 1, None), (20, 2, (10, 1))) == (20, 2)


def test_no_manifest_gives_none():
    assert newest([]) is None
    assert rules([]) == ()
