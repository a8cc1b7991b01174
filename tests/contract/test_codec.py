"""One rule converts every core value to its message and back; each pair is tried (F60, P9)."""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import (
    abandoned_step,
    announcements,
    attempts,
    decision,
    failure_record,
    hints,
    ids,
    inventory,
    needs,
    node_view,
    persistence_rules,
    persistence_work,
    protection,
    reports,
    rounds,
    session,
    shard,
    sources,
    stripes,
    user_events,
)
from holdfast.errors import InvalidRequestError
from holdfast.rpc.codec import from_message, to_message
from holdfast.v1 import agent_pb2, common_pb2, metadata_pb2, persistence_pb2
from holdfast_services.transport import located

RENAMED = {"SessionUpdate": "UpdateRequest", "Located": "LocateResponse"}


def message_of(cls):
    name = RENAMED.get(cls.__name__, cls.__name__)
    homes = (common_pb2, metadata_pb2, agent_pb2, persistence_pb2)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


VALUES = [
    cls
    for module in (
        ids,
        announcements,
        failure_record,
        hints,
        reports,
        rounds,
        sources,
        stripes,
        abandoned_step,
        decision,
        inventory,
        node_view,
        persistence_rules,
        shard,
        user_events,
        attempts,
        needs,
        protection,
        session,
        persistence_work,
        located,
    )
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
]
INT_MAX = {"rank": 2**31 - 1, "volume": 2**31 - 1, "world_size": 2**31 - 1, "replicas": 2**31 - 1}
INT_MAX |= dict.fromkeys(
    (
        "n",
        "k",
        "ranks",
        "code",
        "port",
        "port_taken",
        "master_port",
        "first_rank",
        "node_rank",
        "nodes_count",
        "nodes_min",
        "nodes_max",
        "restarts_max",
        "m",
        "number",
        "elements_count",
        "seats",
        "last",
        "best",
        "local_world_size",
        "slots",
        "saving_slots",
        "devices",
    ),
    2**31 - 1,
)


def strategy(hint, name, most=3):
    """Return what draws a value; lists in lists have one item at most, or they grow for long."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(strategy(inner[0], name, 1), max_size=most).map(tuple)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(st.none() if t is type(None) else strategy(t, name, most) for t in inner)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
    if dataclasses.is_dataclass(hint):
        return values(hint, most)
    hint = getattr(hint, "__supertype__", hint)
    if issubclass(hint, IntEnum):
        return st.sampled_from(hint)
    return {
        bool: st.booleans(),
        int: st.integers(0, INT_MAX.get(name, 2**63 - 1)),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        bytes: st.binary(max_size=16),
    }[hint]


def values(cls, most=3):
    hints = typing.get_type_hints(cls)
    specs = dataclasses.fields(cls)
    named = {spec.name: strategy(hints[spec.name], spec.name, most) for spec in specs}
    return st.builds(cls, **named)


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_a_value_and_its_message_have_the_same_fields(cls):
    message = message_of(cls)

    assert message is not None, f"{cls.__name__} has no message in proto/; add one of that name"
    assert {field.name for field in message.DESCRIPTOR.fields} == {
        spec.name for spec in dataclasses.fields(cls)
    }


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_a_value_goes_through_the_wire_unchanged(cls, data):
    value = data.draw(values(cls))
    sent = to_message(value, message_of(cls)).SerializeToString()

    assert value == from_message(message_of(cls).FromString(sent), cls)


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
def test_an_empty_message_is_a_value_or_refused(cls):
    """Whatever arrives, only our own error leaves the codec."""
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(from_message(message_of(cls)(), cls), cls)


@pytest.mark.parametrize(
    ("message", "cls"),
    [
        (metadata_pb2.HeldShard(state=99), inventory.HeldShard),
        (metadata_pb2.Inventory(shards=[metadata_pb2.HeldShard(state=99)]), inventory.Inventory),
        (metadata_pb2.Want(reason=99), node_view.Want),
        (common_pb2.RankReport(wants_save=99), reports.RankReport),
        (metadata_pb2.Decision(state=-1), decision.Decision),
        (agent_pb2.SessionView(restore={"decision": {"state": 5}}), session.SessionView),
    ],
)
def test_an_enum_number_from_the_future_is_refused(message, cls):
    """F94: not guessed at, not taken for another."""
    received = type(message).FromString(message.SerializeToString())
    with pytest.raises(InvalidRequestError, match="malformed"):
        from_message(received, cls)


def test_a_kind_from_the_future_is_refused():
    """F94: a source that cannot be told is not left out, nor taken for another."""
    later = metadata_pb2.Source.FromString(bytes([15 << 3 | 2, 0]))
    with pytest.raises(InvalidRequestError, match="Source of a kind that is not known here"):
        from_message(metadata_pb2.Want(sources=[later]), node_view.Want)


@pytest.mark.parametrize(
    ("enum", "message"),
    [
        (inventory.HeldState, metadata_pb2.HeldShard.State),
        (decision.DecisionState, metadata_pb2.Decision.State),
        (node_view.WantReason, metadata_pb2.Want.Reason),
        (announcements.SaveReason, common_pb2.Announcement.Reason),
    ],
)
def test_enums_have_the_numbers_of_the_wire(enum, message):
    prefix = message.DESCRIPTOR.name.upper() + "_"

    assert {prefix + item.name: item.value for item in enum} == dict(message.items())


def test_nan_survives():
    update = session.SessionUpdate(session="s", report=reports.RankReport(step_s=math.nan))
    sent = to_message(update, agent_pb2.UpdateRequest).SerializeToString()

    assert math.isnan(
        from_message(agent_pb2.UpdateRequest.FromString(sent), session.SessionUpdate).report.step_s
    )


def test_an_unknown_field_is_ignored():
    """F94: a newer peer may say more."""
    sent = to_message(ids.CheckpointId("r", 1, 2), common_pb2.CheckpointId).SerializeToString()
    more = sent + bytes([15 << 3, 7])

    assert ids.CheckpointId("r", 1, 2) == from_message(
        common_pb2.CheckpointId.FromString(more), ids.CheckpointId
    )
