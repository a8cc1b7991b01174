"""Where a checkpoint was taken is plain data of it."""

from __future__ import annotations

import pytest

from holdfast.auto.place import PassPlace
from holdfast.errors import ManifestError


def test_it_comes_back_from_its_value():
    place = PassPlace(1, 4, used_up=True, loads=2)
    assert PassPlace.of(place.value()) == place


@pytest.mark.parametrize(
    "value", [None, 3, {}, {"number": 1, "count": True, "used_up": False}, {"number": 1}]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ManifestError, match="no place in a script"):
        PassPlace.of(value)


def test_the_state_is_loaded_before_the_pass_or_behind_it():
    inside, behind = PassPlace(0, 2, used_up=False), PassPlace(0, 2, used_up=True)
    assert [inside.is_inside(0, n) for n in (1, 2, 3)] == [False, True, False]
    assert not inside.is_after(0, 2)
    assert not behind.is_inside(0, 2)
    assert behind.is_after(0, 2)
    assert not behind.is_after(1, 2)
