"""A node is told of, and fetches, what its ranks need of a checkpoint; nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.metadata.conftest import JOB, RUN
from tests.unit.metadata.test_restore_decision import fresh, save

from holdfast.core.ids import WORLD_SIZE_MAX, CheckpointId
from holdfast.core.inventory import RankStatus
from holdfast.core.needs import RANGES_COUNT_MAX, SHARDS_COUNT_MAX, ByteRange, Needs, ShardNeed
from holdfast.core.node_view import WantReason
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain.inventory_limits import received


def saved(cluster, *, names_needs, nodes=("a", "b", "c")):
    """A step of one shard per node without copies, and an attempt on other places."""
    generation = fresh(cluster, *nodes, replicas=0)
    save(cluster, 8, generation, nodes, copies=False)
    cluster.launch(b"second", *reversed(nodes), replicas=0)
    for rank, node in enumerate(reversed(nodes)):
        cluster.status(node, rank, names_needs=names_needs)
        cluster.report(node)
    return CheckpointId(RUN, 8, generation)


def told(cluster, node):
    view = cluster.view(node)
    decision = view.runs[0].decision
    wanted = [want.shard.id.rank for want in view.wants]
    return [shard.id.rank for shard in decision.shards], wanted, decision.shards_count


def name(cluster, node, rank, key, *ranks):
    needs = Needs(checkpoint=key, shards=tuple(ShardNeed(rank=item) for item in ranks))
    cluster.status(node, rank, names_needs=True, needs=needs)
    cluster.report(node)


def test_ranks_that_name_nothing_need_all_of_it(cluster):
    saved(cluster, names_needs=False)

    assert told(cluster, "a") == ([0, 1, 2], [1, 2], 3)


def test_nothing_is_fetched_for_a_rank_that_has_yet_to_name_its_needs(cluster):
    saved(cluster, names_needs=True)

    assert cluster.decided()[0] == "PROPOSED"
    assert told(cluster, "a") == ([], [], 3)


def test_a_node_fetches_what_its_ranks_named_and_nothing_else(cluster):
    """Part 1 of needs: rank 2 is on node a now, and needs shard 2 of the three."""
    key = saved(cluster, names_needs=True)
    name(cluster, "a", 2, key, 2)
    name(cluster, "b", 1, key, 1)

    assert told(cluster, "a") == ([2], [2], 3)
    assert told(cluster, "b") == ([1], [], 3)
    assert told(cluster, "c") == ([], [], 3)


def test_what_is_loaded_in_parts_is_asked_for_as_a_lost_copy_too(cluster):
    """P5: parts are nobody's copy. Copies of an older step took the last slot meanwhile."""
    generation = fresh(cluster, "a", "b")
    save(cluster, 8, generation, ("a", "b"), copies=False)
    cluster.launch(b"second", "b", "a")
    key = CheckpointId(RUN, 8, generation)
    for rank, node in enumerate("ba"):
        name(cluster, node, rank, key, rank)
    wanted = [(WantReason.RESTORE, 0)]
    assert wanted == [(want.reason, want.shard.id.rank) for want in cluster.view("b").wants]

    cluster.ready(("b", 0), ("a", 1))

    assert cluster.decided()[0] == "CONFIRMED"
    wanted.append((WantReason.REPAIR, 0))
    assert wanted == [(want.reason, want.shard.id.rank) for want in cluster.view("b").wants]


def test_needs_of_two_ranks_of_one_node_are_told_together(cluster):
    generation = fresh(cluster, "a", "b", "c", replicas=0)
    save(cluster, 8, generation, ("a", "b", "c"), copies=False)
    cluster.launch(b"second", "a", "a", "b", replicas=0)
    key = CheckpointId(RUN, 8, generation)
    name(cluster, "a", 0, key, 2)
    name(cluster, "a", 1, key, 0, 2)

    assert told(cluster, "a") == ([0, 2], [2], 3)


@pytest.mark.parametrize("stale", ["checkpoint", "generation", "nonce", "loaded", "dead"])
def test_needs_of_something_else_count_for_nothing(cluster, stale):
    key = saved(cluster, names_needs=True)
    other = replace(key, step=7) if stale == "checkpoint" else key
    name(cluster, "a", 2, other, 2)
    changes = {
        "generation": {
            "generation": 1,
            "needs": Needs(checkpoint=key, shards=(ShardNeed(rank=2),)),
        },
        "nonce": {"nonce": b"another"},
        "loaded": {"loaded": True},
        "dead": {"live": False},
    }
    cluster.status("a", 2, **changes.get(stale, {}))
    cluster.report("a")

    assert told(cluster, "a")[:2] == ([], [])


def test_who_needs_all_on_a_node_has_all_of_it_told(cluster):
    key = saved(cluster, names_needs=True)
    needs = Needs(checkpoint=key, whole=True)
    cluster.status("a", 2, needs=needs)
    cluster.report("a")
    assert told(cluster, "a") == ([0, 1, 2], [1, 2], 3)

    cluster.status("b", 1, names_needs=False)
    cluster.report("b")
    assert told(cluster, "b") == ([0, 1, 2], [0, 2], 3)


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_that_was_killed_makes_its_node_fetch_nothing_more(cluster, whole):
    """P8: of two ranks on node a, one dies; the other's needs stay."""
    generation = fresh(cluster, "a", "b", "c", replicas=0)
    save(cluster, 8, generation, ("a", "b", "c"), copies=False)
    cluster.launch(b"second", "a", "a", "b", replicas=0)
    key = CheckpointId(RUN, 8, generation)
    name(cluster, "a", 1, key, 1)
    cluster.status("a", 1, names_needs=not whole, live=False)
    name(cluster, "a", 0, key, 2)

    assert told(cluster, "a") == ([2], [2], 3)


def test_a_rank_that_comes_back_in_its_attempt_has_what_it_names_anew(cluster):
    """Its old session is dead, and is reported beside the new one."""
    key = saved(cluster, names_needs=True)
    name(cluster, "a", 2, key, 1)
    old = replace(cluster.machines["a"].ranks[2], live=False)
    cluster.machines["a"].ranks["old"] = old
    cluster.status("a", 2, needs=None)
    cluster.report("a")
    assert told(cluster, "a")[:2] == ([], [])

    name(cluster, "a", 2, key, 2)

    assert told(cluster, "a") == ([2], [2], 3)


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (-1, 2), (2, 2), (0, WORLD_SIZE_MAX + 1)])
def test_a_shard_that_no_world_has_is_refused(cluster, rank, world):
    """Of no ranks it passed for a whole checkpoint, and ranks divided by its world size."""
    cluster.hold("a", 8, 1, rank, world=world, digest=b"d" * 16)

    with pytest.raises(InvalidRequestError, match="of a world of"):
        received(cluster.inventory("a"))


ONE = ByteRange(begin=0, end=4)


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ((ShardNeed(rank=1), ShardNeed(rank=1)), "named twice"),
        ((ShardNeed(rank=-1),), "rank -1"),
        ((ShardNeed(rank=0, volume=-1),), "volume -1"),
        ((ShardNeed(rank=0, ranges=(ByteRange(begin=4, end=4),)),), "not empty"),
        ((ShardNeed(rank=0, ranges=(ByteRange(begin=-4, end=4),)),), "sorted"),
        ((ShardNeed(rank=0, ranges=(ByteRange(begin=8, end=9), ONE)),), "sorted"),
        ((ShardNeed(rank=0, ranges=(ONE, ByteRange(begin=4, end=8))),), "apart"),
        ((ShardNeed(rank=0, ranges=(ONE,) * (RANGES_COUNT_MAX + 1)),), "at most"),
        (tuple(ShardNeed(rank=rank) for rank in range(SHARDS_COUNT_MAX + 1)), "at most"),
    ],
    ids=["twice", "rank", "volume", "empty", "negative", "order", "touching", "ranges", "shards"],
)
def test_needs_that_no_rank_can_have_are_refused(cluster, shards, said):
    """P9: whoever sent them."""
    cluster.join("a")
    needs = Needs(checkpoint=CheckpointId(RUN, 8, 1), shards=shards)
    status = RankStatus(job=JOB, run=RUN, generation=1, rank=0, needs=needs)

    with pytest.raises(InvalidRequestError, match=said):
        received(replace(cluster.inventory("a"), ranks=(status,)))
