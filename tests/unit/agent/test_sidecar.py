"""An agent's sidecar: the store's, and whose copy it is; an odd one is no sidecar."""

from __future__ import annotations

import json

import pytest

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState
from holdfast.core.shard import Shard
from holdfast.errors import ManifestError, UnsupportedFormatError
from holdfast.format import sidecar as stored
from holdfast.format.digest import part_digests, root_digest
from holdfast_services.agent import sidecar
from holdfast_services.agent.domain import Content

DATA = b"x" * 100
DIGESTS = tuple(part_digests(memoryview(DATA)))
CONTENT = Content(
    shard=Shard(
        id=ShardId("r1", 10, 1, 0),
        job="j",
        world_size=2,
        plan_hash="p",
        length_bytes=len(DATA),
        root_digest=root_digest(len(DATA), DIGESTS),
    ),
    owner="a",
    digests=b"".join(DIGESTS),
    source="peer",
    held=HeldState.QUARANTINED,
)


def changed(**fields):
    return json.dumps({**json.loads(sidecar.encode(CONTENT)), **fields}).encode()


def test_what_was_written_comes_back():
    assert CONTENT == sidecar.decode(sidecar.encode(CONTENT), len(DATA))


def test_a_sidecar_of_an_older_agent_is_read():
    """Before there was one codec the text had spaces and another order of keys."""
    old = json.dumps(dict(reversed(json.loads(sidecar.encode(CONTENT)).items()))).encode()

    assert CONTENT == sidecar.decode(old, len(DATA))


def test_it_says_all_that_the_stores_sidecar_says():
    said = json.loads(stored.encode(stored.Sidecar(shard=CONTENT.shard, digests=DIGESTS)))

    assert said.items() <= json.loads(sidecar.encode(CONTENT)).items()


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": "00"},
        {"parts": "00" * 16},
        {"root": "zz"},
        {"world_size": 0},
        {"world_size": "2"},
        {"length_bytes": 1 << 70},
        {"owner": "../a"},
        {"owner": 7},
        {"quarantined": "no"},
        {"shard": "r1/010/1/0/0"},
    ],
    ids=str,
)
def test_a_sidecar_that_breaks_a_rule_is_refused(fields):
    with pytest.raises(ManifestError):
        sidecar.decode(changed(**fields), len(DATA))


def test_a_sidecar_of_another_length_or_version_is_refused():
    with pytest.raises(ManifestError, match="100 bytes, not 99"):
        sidecar.decode(sidecar.encode(CONTENT), len(DATA) - 1)
    with pytest.raises(UnsupportedFormatError):
        sidecar.decode(changed(version=2), len(DATA))
