"""An optimizer that is put together from the texts of several ranks, and what is not."""

import pytest

from holdfast.errors import InvalidRequestError
from holdfast.format.blob import Live, SavedOptimizer, StateBlob, Static
from holdfast.state.gathered import gather


def text(*names, lr=1, strict=True, aliases=None):
    """What a rank says that has an optimizer of one group with these parameters."""
    saved = SavedOptimizer(strict, [list(names)], [[["exp_avg"], list(names)]] if strict else [])
    return StateBlob(
        static=Static(objects={"o": saved}, aliases=aliases or {}, world_size=2),
        live=Live(groups={"o": [{"lr": lr}]}, loose={} if strict else {"o": {}}),
    )


def gathered(names, *texts, some=False, aliases_here=None):
    return gather("o", names, enumerate(texts), aliases_here=aliases_here or {}, some=some)


def test_parameters_of_two_ranks_make_one_optimizer():
    found = gathered([["a", "b"]], text("a"), text("b"))

    assert found.saved.params == [["a", "b"]]
    assert found.saved.state == [[["exp_avg"], ["a", "b"]]]
    assert [group.rank for group in found.groups] == [0]


@pytest.mark.parametrize("some", [True, False])
def test_what_was_saved_of_more_is_of_another_rank_or_does_not_fit(some):
    """Where no other rank has the rest now, leaving it out would lose it."""
    found = gathered([["a"]], text("a"), text("b"), some=some)

    assert (found is not None) == some


def test_a_second_name_of_what_is_here_is_not_more():
    found = gathered([["a"]], text("a"), text("b"), aliases_here={"b": "a"})

    assert found.saved.params == [["a"]]


def test_a_second_name_then_is_what_it_was_saved_as():
    found = gathered([["b"]], text("a", aliases={"b": "a"}), some=True)

    assert found.called == {"b": "a"}


@pytest.mark.parametrize("names", [[["a", "c"]], [["a", "b"], []]])
def test_a_parameter_that_nobody_saved_or_a_group_of_none_is_not_made_up(names):
    assert gathered(names, text("a"), text("b")) is None


def test_an_optimizer_with_more_than_tensors_is_not_put_together():
    assert gathered([["a", "b"]], text("a"), text("b", strict=False)) is None


@pytest.mark.parametrize(("one", "two"), [(1, 2), ({"$ref": "o.lr"}, {"$ref": "o.lr"})])
def test_groups_with_other_settings_or_tensors_of_two_ranks_are_refused(one, two):
    """A tensor among the settings is each rank's own: that both have the same is not known."""
    with pytest.raises(InvalidRequestError, match="'a' and 'b' in one group, and ranks 0 and 1"):
        gathered([["a", "b"]], text("a", lr=one), text("b", lr=two))
