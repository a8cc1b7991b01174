"""``core.boxes``: the corner cases by hand; tests/property has the rest."""

import pytest

from holdfast.format.boxes import Box, covers, intersect, whole


def test_two_scalars_share_their_one_element():
    assert whole(()) == intersect(whole(()), whole(()))
    assert 1 == whole(()).elements_count


def test_an_empty_box_shares_nothing():
    assert intersect(Box((1,), (0,)), Box((0,), (4,))) is None


def test_touching_boxes_are_disjoint():
    assert intersect(Box((0,), (2,)), Box((2,), (2,))) is None


def test_boxes_of_other_dims_are_refused():
    with pytest.raises(ValueError, match="dims differ: 1 and 2"):
        intersect(whole((1,)), whole((1, 1)))


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,)), ((), (1,))]
)
def test_a_box_that_is_none_cannot_be_made(offsets, lengths):
    with pytest.raises(ValueError, match="offset"):
        Box(offsets, lengths)


def test_an_empty_tensor_is_covered_by_nothing():
    """F39: empty shards are whole at once."""
    assert covers(whole((0, 4)), [])
    assert covers(whole((0, 4)), [whole((0, 4))])


def test_a_scalar_is_covered_by_itself_only():
    """F39: 0-dim tensors."""
    assert covers(whole(()), [whole(())])
    assert not covers(whole(()), [])


def test_a_fine_grid_is_looked_at_in_no_time():
    """A tensor cut over a mesh of 64 by 64, in any order, and one piece of it gone."""
    grid = [Box((row, column), (1, 1)) for column in range(64) for row in range(64)]

    assert covers(whole((64, 64)), grid)
    assert not covers(whole((64, 64)), [*grid[:777], *grid[778:]])


@pytest.mark.parametrize("axis", [0, 1])
def test_every_other_piece_of_many_missing_is_noticed_in_no_time(axis):
    place = ((0, 1), (1, 0))[axis]
    pieces = [Box(tuple(at * n for n in place), (1, 1)) for at in range(0, 20_000, 2)]
    shape = tuple(1 + 19_999 * n for n in place)

    assert not covers(whole(shape), pieces)


def test_an_overlap_hides_no_hole():
    """As many elements as are asked for, but some of them twice."""
    assert not covers(whole((4,)), [Box((0,), (2,)), Box((1,), (2,)), Box((0,), (1,))])


def test_a_missing_row_is_noticed():
    assert not covers(whole((4, 4)), [Box((0, 0), (2, 4)), Box((3, 0), (1, 4))])


def test_within_gives_slices_of_the_outer_array():
    assert (slice(1, 3), slice(0, 2)) == Box((3, 4), (2, 2)).within(Box((2, 4), (4, 4)))


def test_within_refuses_a_box_outside():
    """A negative slice would silently select from the other end."""
    with pytest.raises(ValueError, match="does not lie inside"):
        Box((1,), (2,)).within(Box((2,), (4,)))
