"""A spec that no attempt can have is refused, and the message names the field."""

from dataclasses import replace

import pytest
from tests.said import attempt_spec

from holdfast.core.attempts import NONCE_BYTES_MAX, REPLICAS_MAX, TEXT_LENGTH_MAX, check
from holdfast.core.decision import Start
from holdfast.core.ids import GENERATION_MAX, STEP_MAX, CheckpointId
from holdfast.core.persistence_rules import PersistRule, Retention
from holdfast.core.protection import Copies, Parity
from holdfast.errors import InvalidRequestError


def test_a_spec_that_can_be_is_taken():
    past = CheckpointId("r1", 7, 1)
    check(attempt_spec(world_size=8, rank=7, local_world_size=4, generation=3, restored=past))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"job": "no job"}, "job name"),
        ({"nonce": b""}, "nonce"),
        ({"nonce": b"n" * (NONCE_BYTES_MAX + 1)}, "nonce"),
        ({"rank": 1}, "rank 1 of world size 1"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "world size 0"),
        ({"local_world_size": 2}, "local world size 2"),
        ({"replicas": REPLICAS_MAX + 1}, "replicas"),
        ({"parity": Parity(1, 1)}, r"Parity\(1, 1\) must have k of 2 to 64"),
        ({"parity": Parity(65, 1)}, "Parity"),
        ({"parity": Parity(2, 0)}, "Parity"),
        ({"parity": Parity(2, 17)}, "Parity"),
        ({"parity": Parity(2, 1), "replicas": 1}, "two protections"),
        ({"slots": 1}, "slots=1 must be 2 to 16"),
        ({"slots": 17}, "slots=17"),
        ({"slots": -2}, "slots=-2"),
        ({"persist": PersistRule(seconds=float("nan"))}, "persist"),
        ({"persist": PersistRule(steps=STEP_MAX + 1)}, "persist"),
        ({"generation": GENERATION_MAX}, "attempt"),
        ({"generation": 2, "restored": CheckpointId("R!", 1, 1)}, "run id"),
        ({"generation": 2, "restored": CheckpointId("r", -1, 1)}, "restored step"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_by_name(said, named):
    with pytest.raises(InvalidRequestError, match=named):
        check(replace(attempt_spec(), **said))


@pytest.mark.parametrize("text", ["host\0:1", "x" * (TEXT_LENGTH_MAX + 1)])
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("holder", lambda text: {"holder": text}),
        ("launcher", lambda text: {"launcher": text}),
        ("parity.domain", lambda text: {"parity": Parity(2, 1, text)}),
        ("replica_domain", lambda text: {"replica_domain": text}),
        ("start.name", lambda text: {"start": Start(name=text)}),
        ("retention.metric", lambda text: {"retention": Retention(best=1, metric=text)}),
    ],
)
def test_texts_that_no_database_takes_are_refused(named, said, text):
    """Postgres takes no NUL in a text: without this a job's registrations would fail for ever."""
    with pytest.raises(InvalidRequestError, match=f"^{named} "):
        check(attempt_spec(**said(text)))


def test_what_is_asked_for_is_copies_unless_it_is_parity():
    assert attempt_spec(replicas=2, replica_domain="rack").protection == Copies(2, "rack")
    asked = attempt_spec(parity=Parity(4, 2))
    check(asked)
    assert asked.protection == Parity(4, 2)
