"""``holdfast.garbage``: the search for garbage is afterwards as it was before."""

import gc
import weakref

import pytest

from holdfast import garbage
from holdfast.garbage import no_collection


@pytest.fixture(autouse=True)
def _nothing_is_known_of_what_is_frozen(monkeypatch):
    monkeypatch.setattr(garbage, "_frozen_counts", [])


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


class Node:
    def __init__(self):
        self.me = self


@no_collection()
def make_nodes(count):
    return [Node() for _ in range(count)]


def test_what_was_made_meanwhile_is_not_searched_right_afterwards(request):
    """It would take as long as it took to make it, and finds nothing; a full search finds it."""
    searched = []

    def watch(phase, info):
        if phase == "start" and info["generation"] == 0:
            searched.append(len(gc.get_objects(generation=0)))

    gc.callbacks.append(watch)
    request.addfinalizer(lambda: gc.callbacks.remove(watch))
    nodes = make_nodes(50_000)
    more = [[] for _ in range(5_000)]
    assert searched, f"no search came with {len(more)} objects more"
    assert max(searched) < 50_000
    made = weakref.ref(nodes[0])
    nodes.clear()
    gc.collect()

    assert made() is None


def test_the_few_objects_that_python_begins_with_frozen_are_none_of_a_script(monkeypatch):
    """Python 3.12 has 375; what is made would be searched right afterwards in each process."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    thawed = []
    monkeypatch.setattr(gc, "unfreeze", lambda thaw=gc.unfreeze: thawed.append(thaw()))

    make_nodes(1)

    assert thawed


def test_what_a_script_has_frozen_stays_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        make_nodes(1)
        make_nodes(1)

        assert 0 < gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()


def test_what_is_frozen_after_the_first_look_stays_frozen_too(monkeypatch):
    """Only that there is some is remembered; it is counted once, since each count is a walk."""
    make_nodes(1)
    counted, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    gc.freeze()
    try:
        for _ in range(3):
            make_nodes(1)

        assert count()
    finally:
        gc.unfreeze()
    assert [True] == list(map(bool, counted))
