"""Hostile headers, each refused with its own words (P9; style 7.30).

``attacks.json`` holds them as edits of one honest header, so that a reader sees the lie alone.
``raw`` replaces the whole header, ``prefix`` its length, ``edit`` sets what lies at a path.
"""

import json
import struct
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.format.header import parse_header

ATTACKS = json.loads((Path(__file__).parent / "attacks.json").read_text())
DATA_BYTES = 32 + 10
HONEST = {
    "__metadata__": {
        "holdfast.version": "1",
        "holdfast.job": "team/gpt",
        "holdfast.run": "r7",
        "holdfast.step": "000000000001200",
        "holdfast.generation": "0000000003",
        "holdfast.rank": "1",
        "holdfast.world_size": "2",
        "holdfast.volume": "0",
        "holdfast.plan": "9f2c",
        "holdfast.parent": "-" * 26,
        "DCP_SHARDING_INFO": {
            "w": {"saved_offsets": [2, 0], "global_shape": [4, 4]},
            "b": {"saved_offsets": [0], "global_shape": [10]},
        },
    },
    "w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "U8", "shape": [10], "data_offsets": [32, 42]},
}
GONE = "<gone>"


def swollen(text):
    return text.replace("<deep>", "[" * 200_000).replace("<digits>", "9" * 5_000)


def header(table):
    table = json.loads(json.dumps(table))
    metadata = table.get("__metadata__")
    if isinstance(metadata, dict) and isinstance(metadata.get("DCP_SHARDING_INFO"), dict):
        metadata["DCP_SHARDING_INFO"] = json.dumps(metadata["DCP_SHARDING_INFO"])
    return json.dumps(table).encode()


def padded(text):
    return text + b" " * (-(len(text) + 8) % 64)


def edited(edits):
    table = json.loads(json.dumps(HONEST))
    for path, value in edits.items():
        *parents, last = path.split("/")
        inner = table
        for key in parents:
            inner = inner[key]
        if value == GONE:
            del inner[last]
        else:
            inner[last] = swollen(value) if isinstance(value, str) else value
    return header(table)


def segment(attack):
    """Return the first bytes of the segment and its claimed length."""
    if "raw" in attack:
        text = swollen(attack["raw"]).encode(attack.get("encoding", "utf-8"))
    else:
        text = edited(attack["edit"])
    text = text if attack.get("unpadded") else padded(text)
    prefix = attack.get("prefix", len(text))
    return struct.pack("<Q", prefix) + text, 8 + len(text) + attack.get("data", DATA_BYTES)


def test_the_honest_header_is_taken():
    data, length = segment({"edit": {}})

    assert ["w", "b"] == [entry.spec.fqn for entry in parse_header(data, length).entries]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_with_its_own_error(name):
    attack = ATTACKS[name]
    expected = getattr(errors, attack.get("error", "ManifestError"))
    data, length = segment(attack)
    with pytest.raises(errors.CheckpointError, match=attack["says"]) as caught:
        parse_header(data, length)

    assert expected is type(caught.value)
    assert len(str(caught.value)) < 2_000


def test_many_keys_with_one_twice_are_refused_in_linear_time():
    """A million names, the last two equal: looking each one up in the list took hours."""
    names = ",".join(f'"{i}":0' for i in range(1_000_000))
    data = padded(f'{{{names},"x":0,"x":0}}'.encode())
    with pytest.raises(errors.ManifestError, match="'x' stands twice"):
        parse_header(struct.pack("<Q", len(data)) + data, 8 + len(data))
