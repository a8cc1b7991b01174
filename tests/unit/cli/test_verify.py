"""Which copies are checked, and what the outcome means (G20)."""

from __future__ import annotations

import pytest

from holdfast.cli.verify import ASKS_COUNT_MAX, Verdict, copies_to_ask, judge

CHECKPOINT = {
    "run": "r1",
    "step": 7,
    "generation": 2,
    "shards": [
        {
            "rank": rank,
            "volume": 0,
            "length_bytes": 1 << 30,
            "replicas": [{"node": "a", "tier": "memory"}, {"node": "b", "tier": "peer"}],
        }
        for rank in (0, 1)
    ],
}
NODES = {"a": "h:1", "b": "h:2"}


def verdicts(*bad: tuple[int, str]) -> list[Verdict]:
    return [
        Verdict(copy=copy, ok=(copy.shard.rank, copy.node) not in bad, detail="differs")
        for copy in copies_to_ask(CHECKPOINT, NODES)
    ]


def test_every_live_node_is_asked_for_every_shard():
    """Quarantined copies are in no list, and are the ones that matter."""
    copies = copies_to_ask(CHECKPOINT, {"b": "h:2", "c": "h:3"})

    assert [(copy.shard.key, copy.address, copy.listed) for copy in copies] == [
        ("r1/7/2/0/0", "h:2", True),
        ("r1/7/2/0/0", "h:3", False),
        ("r1/7/2/1/0", "h:2", True),
        ("r1/7/2/1/0", "h:3", False),
    ]


def test_in_a_large_cluster_only_listed_holders_are_asked():
    others = {f"n{i}": f"h:{i}" for i in range(ASKS_COUNT_MAX)}
    copies = copies_to_ask(CHECKPOINT, {**others, **NODES})

    assert [copy.node for copy in copies] == ["a", "b", "a", "b"]


def test_the_deadline_grows_with_the_size():
    copy = copies_to_ask(CHECKPOINT, NODES)[0]

    assert copy.timeout_s == pytest.approx(10 + 1024 / 200)


def test_good_copies_of_all_shards_are_success():
    report = judge(CHECKPOINT, verdicts())

    assert not report.failed
    assert report.text[-1] == "step 7: all 2 shards match their digests, each on 2 nodes"


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(0, "a"), (1, "a")], "all 2 shards match their digests, each on one node only"),
        ([(0, "a"), (1, "a"), (1, "b")], "all 2 shards match their digests, each on 1 to 2 nodes"),
    ],
)
def test_a_shard_that_one_node_alone_holds_is_not_said_to_have_a_copy(places, text):
    found = [v for v in verdicts() if (v.copy.shard.rank, v.copy.node) in places]

    assert judge(CHECKPOINT, found).text[-1] == f"step 7: {text}"


def test_the_shard_of_a_single_rank_is_one():
    alone = {**CHECKPOINT, "shards": CHECKPOINT["shards"][:1]}
    found = [v for v in verdicts() if (v.copy.shard.rank, v.copy.node) == (0, "a")]

    assert judge(alone, found).text[-1] == "step 7: its shard matches its digest, on one node only"


def test_one_bad_copy_fails_and_is_named_with_its_node():
    report = judge(CHECKPOINT, verdicts((1, "b")))

    assert report.failed
    assert "bad copy: r1/7/2/1/0 on b: differs" in report.text
    assert report.data["missing"] == []


def test_a_shard_without_any_good_copy_is_named():
    report = judge(CHECKPOINT, verdicts((0, "a"), (0, "b")))

    assert report.data["missing"] == ["r1/7/2/0/0"]
    assert "no good copy in memory: r1/7/2/0/0" in report.text
