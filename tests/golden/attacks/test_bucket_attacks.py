"""Hostile manifests, sidecars, indexes and folders, each refused with its own words (P9).

``bucket.json`` holds them as edits of honest ones: ``edit`` sets what lies at a path, ``raw``
replaces the whole text. Manifest and index get their own digest again after the edit (unless
``undigested``), so that the lie alone is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.golden.attacks.digests import digested
from tests.unit.bucket.folders import make

from holdfast import errors
from holdfast.bucket.verify import verify
from holdfast.format import index, manifest, sidecar
from holdfast.format.digest import part_digests, root_digest
from holdfast.format.header import parse_header
from holdfast.objectstore.memory import MemoryStore

ATTACKS = json.loads((Path(__file__).parent / "bucket.json").read_text())
MADE = make(None)
HONEST = {
    "manifest": manifest.encode(MADE.manifest),
    "sidecar": sidecar.encode(MADE.sidecar(MADE.manifest.shards[1])),
    "index": index.encode(
        index.build(parse_header(data, len(data)) for data in MADE.segments.values())
    ),
}
DECODE = {"manifest": manifest.decode, "sidecar": sidecar.decode, "index": index.decode}
GONE = "<gone>"


def swollen(text):
    nested = "[" * 65 + "]" * 65
    return (
        text.replace("<deep>", "[" * 200_000)
        .replace("<digits>", "9" * 5_000)
        .replace("<nested>", nested)
    )


def attacked(attack):
    if "raw" in attack:
        return swollen(attack["raw"]).encode(attack.get("encoding", "utf-8"))
    table = json.loads(HONEST[attack["of"]])
    for path, value in attack["edit"].items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        inner = table
        for key in parents:
            inner = inner[key]
        if value == GONE:
            del inner[last]
        else:
            inner[last] = value
    data = json.dumps(table, sort_keys=True, separators=(",", ":")).encode()
    return data if attack.get("undigested") else digested(data)


@pytest.mark.parametrize("of", HONEST)
def test_the_honest_one_is_taken(of):
    assert (
        HONEST[of].strip()
        == json.dumps(json.loads(HONEST[of]), sort_keys=True, separators=(",", ":")).encode()
    )
    DECODE[of](attacked({"of": of, "edit": {}}))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_with_its_own_error(name):
    attack = ATTACKS[name]
    expected = getattr(errors, attack.get("error", "ManifestError"))
    with pytest.raises(errors.CheckpointError, match=attack["says"]) as caught:
        DECODE[attack["of"]](attacked(attack))

    assert expected is type(caught.value)
    assert len(str(caught.value)) < 2_000
    str(caught.value).encode()


def oversized(made):
    """The bucket holds more under the name than the format allows."""
    made.store.put(made.folder.sidecar_key(made.manifest.shards[0]), b" " * ((64 << 20) + 1))


def swapped(made):
    """Two honest shards lie under each other's names, sidecars too."""
    first, second = made.manifest.shards
    for here, there in ((first, second), (second, first)):
        made.store.put(made.folder.segment_key(here), made.segments[there])
        made.store.put(made.folder.sidecar_key(here), sidecar.encode(made.sidecar(there)))


def redigested(made):
    """Another segment with a sidecar that fits it: only the manifest knows better."""
    first = made.manifest.shards[0]
    data = bytes(made.segments[first][:-1]) + b"\0"
    digests = part_digests(memoryview(data))
    shard = replace(first, root_digest=root_digest(len(data), digests))
    made.store.put(made.folder.segment_key(first), data)
    made.store.put(
        made.folder.sidecar_key(first),
        sidecar.encode(sidecar.Sidecar(shard=shard, digests=tuple(digests))),
    )


def foreign_header(made):
    """Manifest and sidecar vouch for a segment whose header says that it is another's."""
    first, second = made.manifest.shards
    shard = replace(second, id=first.id, plan_hash=first.plan_hash)
    made.segments = {shard: made.segments[second], second: made.segments[second]}
    made.manifest = replace(made.manifest, shards=(shard, second))
    made.write()


def lying_header(made):
    """Manifest and sidecar vouch for a segment whose header claims 2^60 bytes."""
    first, second = made.manifest.shards
    data = bytearray(made.segments[first])
    data[:8] = (1 << 60).to_bytes(8, "little")
    shard = replace(first, root_digest=root_digest(len(data), part_digests(memoryview(data))))
    made.segments = {shard: bytes(data), second: made.segments[second]}
    made.manifest = replace(made.manifest, shards=(shard, second))
    made.write()


def read(made):
    shard = made.manifest.shards[0]
    made.folder.sidecar(shard)
    made.folder.header(shard)


FOLDERS = {
    oversized: (errors.CorruptionError, "67108864"),
    swapped: (errors.ManifestError, "is not that of the shard in the manifest"),
    redigested: (errors.ManifestError, "is not that of the shard in the manifest"),
    foreign_header: (errors.ManifestError, "r7/1200/3/1/0 lies where r7/1200/3/0/0 should"),
    lying_header: (errors.ManifestError, "header length 1152921504606846976 exceeds"),
}


@pytest.mark.parametrize("attack", FOLDERS, ids=lambda attack: attack.__name__)
def test_an_attack_on_a_folder_is_refused_with_its_own_error(attack):
    kind, says = FOLDERS[attack]
    made = make(MemoryStore()).write()
    attack(made)
    with pytest.raises(kind, match=says) as caught:
        read(made)
    verdict = next(verify(made.folder, made.manifest))

    assert kind is type(caught.value)
    assert "mismatch" == verdict.state.value
    assert says in verdict.detail
