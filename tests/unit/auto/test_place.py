"""Where a checkpoint was taken is plain data of it."""

from __future__ import annotations

import pytest

from holdfast.auto.place import PassPlace
from holdfast.errors import ManifestError


def test_it_comes_back_from_its_value():
    place = PassPlace(1, 4, 3, counted=True, loads=2, loaded="digest")
    assert PassPlace.of(place.value()) == place


@pytest.mark.parametrize(
    "value", [None, 3, {}, {"number": 1, "count": True, "given": "2"}, {"number": 1}]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ManifestError, match="no place in a script"):
        PassPlace.of(value)


def test_the_state_is_loaded_in_that_pass_over_that_loader():
    place = PassPlace(0, 2, 5)
    assert [place.is_in(0, n) for n in (1, 2, 3)] == [False, True, False]
    assert not place.is_in(1, 2)
