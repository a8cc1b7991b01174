"""A record as a line of JSON, with what it is about (F110)."""

import json
import logging
import sys

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.errors import UnavailableError
from holdfast_services.kit.json_lines import JsonLines


def line(message, *arguments, exc_info=None):
    record = logging.LogRecord(
        "holdfast.x", logging.WARNING, "x.py", 1, message, arguments, exc_info
    )
    text = JsonLines("agent").format(record)
    assert "\n" not in text
    return json.loads(text)


def test_ids_and_errors_are_fields():
    told = line("%s of %s", UnavailableError("no answer", job="gpt", rank=3), ShardId("r", 5, 2, 1))

    assert told["message"] == f"no answer (job gpt, rank 3) of {ShardId('r', 5, 2, 1)}"
    fields = {"job": "gpt", "run": "r", "step": "5", "generation": "2", "kind": "unavailable"}
    assert fields.items() <= told.items()
    assert line("%s", CheckpointId("r", 5, 2))["step"] == "5"


def test_no_argument_takes_the_place_of_what_a_line_is():
    told = line("%s", UnavailableError("no", level="high", message="m", at="then"))

    assert told["level"] == "WARNING"
    assert told["message"] == "no (level high, message m, at then)"
    assert told["at"] != "then"


def test_whatever_is_in_a_message_is_one_line():
    assert line("%s", "a\nb\r\u2028\x00{")["message"] == "a\nb\r\u2028\x00{"
    assert line("100 %")["message"] == "100 %"
    assert line("%(a)s", {"a": 1})["message"] == "1"


def test_a_bug_has_its_traceback():
    try:
        int("x")
    except ValueError:
        told = line("failed", exc_info=sys.exc_info())

    assert told["traceback"].startswith("Traceback")
