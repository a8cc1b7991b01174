"""Dataclasses to and from JSON: what is wrong is named (F107)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import pytest

from holdfast.core.records import from_record, to_record
from holdfast.errors import InvalidRequestError


class Kind(Enum):
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    share: float = 0.0
    on: bool = False
    kind: Kind = Kind.PLAIN
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)


FULL = Outer(
    name="a", share=0.5, on=True, inner=Inner(number=1), many=(Inner(number=2),), words={"k": "v"}
)


def test_what_was_written_is_read_again():
    assert FULL == from_record(Outer, to_record(FULL))
    assert Outer(name="b", share=2.0) == from_record(Outer, {"name": "b", "share": 2})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "it must be an object"),
        ({}, "name is missing"),
        ({"name": "a", "nmae": 1}, "nmae is not known; known are name, share"),
        ({"name": 1}, "name must be a text"),
        ({"name": "a\0"}, "name must be a text without NUL"),
        ({"name": "a", "share": "1"}, "share must be a finite number"),
        ({"name": "a", "share": float("nan")}, "share must be a finite number, not nan"),
        ({"name": "a", "share": float("inf")}, "share must be a finite number"),
        ({"name": "a", "share": True}, "share must be a finite number"),
        ({"name": "a", "on": 1}, "on must be true or false"),
        ({"name": "a", "kind": "odd"}, "kind must be one of plain, not 'odd'"),
        ({"name": "a", "inner": {"number": 1.5}}, "inner.number must be a whole number"),
        ({"name": "a", "inner": {"number": 2**63}}, "inner.number must be a whole number"),
        ({"name": "a", "many": [{"number": 1}, {}]}, r"many\[1\].number is missing"),
        ({"name": "a", "many": "text"}, "many must be a list"),
        ({"name": "a", "words": {"k": 1}}, "words.k must be a text"),
        ({"name": "a", "words": []}, "words must be an object"),
    ],
)
def test_what_is_wrong_is_named(record, said):
    with pytest.raises(InvalidRequestError, match=said):
        from_record(Outer, record)
