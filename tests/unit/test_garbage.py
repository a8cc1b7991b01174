"""``holdfast.garbage``: the search for garbage is afterwards as it was before."""

import gc

import pytest

from holdfast.garbage import no_collection


@no_collection()
def fail():
    raise ValueError(f"inside is {gc.isenabled()}")


@pytest.mark.parametrize("was_on", [True, False])
def test_the_search_goes_on_as_it_was_also_after_an_error(was_on):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="inside is False"):
            fail()
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()

    assert was_on is after
