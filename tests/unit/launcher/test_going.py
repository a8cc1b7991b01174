"""A launcher of a node that will be taken away leaves its end to metadata, while that is heard."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.core.rounds import NOTICE_S_MAX, LaunchView, Place
from holdfast.launcher.going import HEARD_S_MAX, SPARE_S_MAX, Going
from holdfast.launcher.notices import seconds_left

PLACE = Place(
    round=1, nonce="L.1", master_address="a", master_port=1, first_rank=0, world_size=2,
    node_rank=0, nodes_count=2,
)  # fmt: skip
HEARD = LaunchView(place=PLACE, goes=True)
GOING = Going(since_s=100.0, over_s=160.0)


def test_it_goes_on_until_its_round_is_over():
    assert not GOING.is_to_end(HEARD, PLACE, 159.0)
    assert GOING.is_to_end(replace(HEARD, place=None), PLACE, 101.0)
    assert GOING.is_to_end(replace(HEARD, place=replace(PLACE, nonce="L.2")), PLACE, 101.0)
    assert GOING.is_to_end(HEARD, None, 101.0)


def test_it_ends_when_all_are_told_to():
    assert GOING.is_to_end(replace(HEARD, stop=True), PLACE, 101.0)


def test_it_ends_when_its_time_is_over():
    assert GOING.is_to_end(HEARD, PLACE, 160.0)
    assert 1.0 == GOING.waits_s(HEARD, 159.0)


def test_it_ends_soon_where_nobody_knows_of_notices():
    """So it is with a metadata service, or an agent, of before."""
    unheard = LaunchView(place=PLACE)
    assert HEARD_S_MAX == GOING.waits_s(unheard, 100.0)
    assert not GOING.is_to_end(unheard, PLACE, 100.0 + HEARD_S_MAX - 0.1)
    assert GOING.is_to_end(unheard, PLACE, 100.0 + HEARD_S_MAX)
    assert 1.0 == Going(since_s=100.0, over_s=101.0).waits_s(unheard, 100.0)


@pytest.mark.parametrize(("left", "told"), [(60.0, 60.0 - SPARE_S_MAX), (4.0, 3.0), (0.0, 0.0)])
def test_metadata_is_told_of_less_time_than_there_is(left, told):
    assert told == Going(since_s=100.0, over_s=100.0 + left).told_s


def of_aws(seconds):
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


def test_a_notice_may_say_how_much_time_is_left():
    left_s = seconds_left(of_aws(1800.0))
    assert left_s is not None
    assert 600.0 < left_s <= 1800.0


@pytest.mark.parametrize(
    "text",
    [
        "maintenance", "TRUE", "", "[]", "3", "null", '{"time": 3}', '{"time": "soon"}',
        '{"action": "stop"}', '{"time": "2017-09-18T08:22:00"}', '{"time": "9999-12-31T23:59:59Z"}',
    ],
)  # fmt: skip
def test_others_do_not_say(text):
    assert seconds_left(text) is None


def test_what_makes_no_sense_is_not_believed():
    assert seconds_left(of_aws(-900.0)) is None
    assert seconds_left(of_aws(NOTICE_S_MAX + 900.0)) is None
    assert seconds_left("[" * 200_000) is None
