"""Cycles are looked for seldom, and still are."""

import gc
import weakref

from holdfast_services.kit.cycles import AFTER_COUNT, look_for_cycles_seldom


class Knot:
    """Refers to itself."""

    def __init__(self):
        self.me = self


def test_a_cycle_is_found_after_many_new_objects():
    before = gc.get_threshold()
    look_for_cycles_seldom()
    try:
        gc.collect()
        knot = weakref.ref(Knot())
        held = [[] for _ in range(2 * AFTER_COUNT)]
        assert knot() is None
        assert before[1:] == gc.get_threshold()[1:]
    finally:
        gc.set_threshold(*before)
    assert held
