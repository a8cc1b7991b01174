"""``core.slot_names``: a slot's state is its file's name (F30, P9)."""

import pytest

from holdfast.core.slot_names import TRANSITIONS, SlotName, SlotState, slot_name
from holdfast.errors import InvalidRequestError


@pytest.mark.parametrize("state", SlotState)
def test_a_name_goes_there_and_back(state):
    slot = SlotName("s12", 7, state)

    assert f"s12.7.{state.value}" == slot.file_name
    assert slot == slot_name(slot.file_name)
    assert "s12.7.sum" == slot.sidecar_name


@pytest.mark.parametrize(
    "name",
    ["", "s1.1.sum", "s1.1.tmp", "s1.1.seg\n", "../s1.1.seg", "s.1.seg", "s1..seg", "s1.-1.seg",
     "s1.1.SEG", "s1.٣.seg", "s1.1.seg.open", "s" + "1" * 10 + ".1.seg", "s1." + "1" * 19 + ".seg"],
)  # fmt: skip
def test_what_is_not_a_slot_is_refused(name):
    with pytest.raises(InvalidRequestError):
        slot_name(name)


@pytest.mark.parametrize("old", SlotState)
@pytest.mark.parametrize("new", SlotState)
def test_only_the_listed_transitions_exist_and_reuse_grows_the_incarnation(old, new):
    """G12: who wakes up late renames a name that no longer exists."""
    slot = SlotName("s1", 4, old)
    if new not in TRANSITIONS[old]:
        with pytest.raises(ValueError, match="cannot become"):
            slot.to(new)
        return

    assert SlotName("s1", 5 if new is SlotState.WRITING else 4, new) == slot.to(new)
