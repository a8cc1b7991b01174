"""What a user says of a step becomes a short JSON text, or is refused by name."""

import json
import math

import pytest

from holdfast.core.reports import NOTE_BYTES_MAX
from holdfast.errors import InvalidRequestError
from holdfast.format.notes import DEPTH_MAX, step_note


def test_notes_are_one_json_object():
    note = step_note(7, {"loss": 0.3, "tags": ("a", 1, None, True), "more": {"x": 2}})

    assert note.step == 7
    assert json.loads(note.json) == {"loss": 0.3, "tags": ["a", 1, None, True], "more": {"x": 2}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_null(value):
    """A run that diverges goes on being saved, and its notes stay JSON."""
    assert json.loads(step_note(7, {"loss": value}).json) == {"loss": None}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("notes", "match"),
    [
        ([1], "notes are a list"),
        ({1: 2}, "the key 1"),
        ({"loss": object()}, r"notes\['loss'\] is a object"),
        ({"a": [b"x"]}, r"notes\['a'\]\[0\] is a bytes"),
        ({"a": "x" * NOTE_BYTES_MAX}, f"exceed {NOTE_BYTES_MAX}"),
        (nested(DEPTH_MAX), "nested deeper"),
        ({"file": "\udc80.bin"}, r"notes\['file'\] has a text that is not Unicode"),
        ({"\udc80": 1}, "notes has a text that is not Unicode"),
    ],
)
def test_what_is_not_plain_or_short_is_refused_by_name(notes, match):
    with pytest.raises(InvalidRequestError, match=match):
        step_note(7, notes)


def test_the_deepest_that_is_allowed_is():
    assert step_note(7, nested(DEPTH_MAX - 1)).json
