"""The sidecar of an element: its stripe with all members' digests; an odd one is none."""

from __future__ import annotations

import json

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.core.stripes import Element, Stripe
from holdfast.errors import ManifestError, UnsupportedFormatError
from holdfast.format.digest import part_digests, root_digest
from holdfast_services.agent import element_sidecar
from holdfast_services.agent.domain import HeldSum

MEMBERS = (b"x" * 100, b"y" * 70)
SUM = b"s" * 100


def root(data):
    return root_digest(len(data), part_digests(memoryview(data)))


def shard(rank, data, step=10):
    key = ShardId(RunId("r1"), Step(step), Generation(1), Rank(rank))
    return Shard(
        id=key, job="j", world_size=2, plan_hash="p", length_bytes=len(data), root_digest=root(data)
    )


STRIPE = Stripe(
    members=tuple(shard(rank, data) for rank, data in enumerate(MEMBERS)), elements_count=2
)
HELD = HeldSum(
    element=Element(stripe=STRIPE, number=1),
    root_digest=root(SUM),
    digests=b"".join(part_digests(memoryview(SUM))),
    member_digests=tuple(b"".join(part_digests(memoryview(data))) for data in MEMBERS),
)


def changed(**fields):
    return json.dumps({**json.loads(element_sidecar.encode(HELD)), **fields}).encode()


def test_what_was_written_comes_back():
    assert HELD == element_sidecar.decode(element_sidecar.encode(HELD), len(SUM))


@pytest.mark.parametrize(
    "fields", [{"version": 2}, {"matrix": "vandermonde"}, {"algorithm": "crc"}, {"matrix": None}]
)
def test_what_another_version_wrote_is_not_read(fields):
    with pytest.raises(UnsupportedFormatError):
        element_sidecar.decode(changed(**fields), len(SUM))


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 2},
        {"number": -1},
        {"elements": 17},
        {"members": []},
        {"members": [1]},
        {"members": "abc"},
        {"members": [{}] * 65},
        {"root": "00" * 16},
        {"root": "x"},
        {"parts": ""},
        {"parts": "00" * 15},
        {"parts": "00" * 32},
    ],
)
def test_what_breaks_a_rule_is_no_sidecar(fields):
    with pytest.raises(ManifestError):
        element_sidecar.decode(changed(**fields), len(SUM))


def test_members_of_another_step_make_no_stripe():
    said = json.loads(element_sidecar.encode(HELD))
    said["members"][1]["shard"] = shard(1, MEMBERS[1], step=11).id.key
    with pytest.raises(ManifestError, match="several checkpoints"):
        element_sidecar.decode(json.dumps(said).encode(), len(SUM))


def test_a_member_whose_digests_do_not_give_its_root_is_refused():
    said = json.loads(element_sidecar.encode(HELD))
    said["members"][0]["parts"] = "00" * 16
    with pytest.raises(ManifestError, match="root"):
        element_sidecar.decode(json.dumps(said).encode(), len(SUM))


def test_a_file_of_another_length_is_no_such_element():
    with pytest.raises(ManifestError, match="100 bytes, not 70"):
        element_sidecar.decode(element_sidecar.encode(HELD), 70)
