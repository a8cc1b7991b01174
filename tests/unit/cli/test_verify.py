"""Which copies are checked, and what the outcome means (G20)."""

from __future__ import annotations

import pytest

from holdfast.cli.verify import Verdict, held_copies, judge

CHECKPOINT = {
    "run": "r1",
    "step": 7,
    "generation": 2,
    "shards": [
        {
            "rank": rank,
            "volume": 0,
            "length_bytes": 1 << 30,
            "copies": [{"node": "a"}, {"node": "b"}],
        }
        for rank in (0, 1)
    ],
}
NODES = {"a": "h:1", "b": "h:2"}


def verdicts(*bad: tuple[int, str]) -> list[Verdict]:
    return [
        Verdict(copy=copy, ok=(copy.shard.rank, copy.node) not in bad, detail="differs")
        for copy in held_copies(CHECKPOINT, NODES)
    ]


def test_every_copy_on_a_known_node_is_checked():
    copies = list(held_copies(CHECKPOINT, {"b": "h:2"}))

    assert [(copy.shard.key, copy.address) for copy in copies] == [
        ("r1/7/2/0/0", "h:2"),
        ("r1/7/2/1/0", "h:2"),
    ]


def test_the_deadline_grows_with_the_size():
    copy = next(held_copies(CHECKPOINT, NODES))

    assert copy.timeout_s == pytest.approx(10 + 1024 / 200)


def test_good_copies_of_all_shards_are_success():
    report = judge(CHECKPOINT, verdicts())

    assert not report.failed
    assert report.text[-1] == "step 7: all 4 copies match their digests"


def test_one_bad_copy_fails_and_is_named_with_its_node():
    report = judge(CHECKPOINT, verdicts((1, "b")))

    assert report.failed
    assert "bad copy: r1/7/2/1/0 on b: differs" in report.text
    assert report.data["missing"] == []


def test_a_shard_without_any_good_copy_is_named():
    report = judge(CHECKPOINT, verdicts((0, "a"), (0, "b")))

    assert report.data["missing"] == ["r1/7/2/0/0"]
    assert "no good copy in memory: r1/7/2/0/0" in report.text
