"""What workers are told to do: items, plans, sources, repairs (G10, G20)."""

from dataclasses import replace

import pytest

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldShard, HeldState
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.queue_items import Item, Kind, parse
from holdfast_services.metadata.domain import worker_plans
from holdfast_services.metadata.domain.model import Checkpoint, NoParent

EVERY_TEN = PersistRule(steps=10)


@pytest.fixture
def tier(cluster):
    """A cluster of two nodes with an object tier."""
    cluster.object_tier()
    cluster.join("a", "b")
    return cluster


def train(cluster):
    return cluster.launch(b"first", "a", "b", persist=EVERY_TEN)


def test_items_are_the_missing_shards_and_then_the_manifest(tier):
    generation = train(tier)
    assert () == worker_plans.items(tier.run)
    tier.commit(10, generation, "a", "b")
    assert ("shard/0123456789ab/10/1/0/0", "shard/0123456789ab/10/1/1/0") == worker_plans.items(
        tier.run
    )
    tier.shard_done(10, generation, 0)
    assert ("shard/0123456789ab/10/1/1/0",) == worker_plans.items(tier.run)
    tier.shard_done(10, generation, 1)

    assert ("manifest/0123456789ab/10/1",) == worker_plans.items(tier.run)


def row(key, **changes):
    return Checkpoint(
        id=key, world_size=2, plan_hash="p", length_bytes=200, local_at_s=7.0,
        notes='{"a":1}', **changes,
    )  # fmt: skip


def facts_of(tier, key, **changes):
    shards = tuple(item.shard for item in tier.machines["a"].shards.values())
    given = {"job": "j", "row": row(key), "shards": shards, **changes}
    return worker_plans.ItemFacts(**given)


@pytest.fixture
def held(tier):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    return tier


@pytest.mark.parametrize(
    ("parent", "named"),
    [(NoParent.BEGAN, None), (NoParent.UNKNOWN, (10, 1)), ((5, 1), (5, 1))],
    ids=["began", "unknown", "restored"],
)
def test_a_manifest_names_the_parent_by_an_id_or_none(held, checkpoint, parent, named):
    """bucket v1: null is step 0; a parent that is not known is written as the checkpoint itself."""
    key = checkpoint(10, 1)
    known = parent if isinstance(parent, NoParent) else checkpoint(*parent)
    given = facts_of(held, key, row=row(key, drain_at_s=1.0, parent=known), missing_count=0)
    plan = worker_plans.plan(Item(Kind.MANIFEST, key), given, held.nodes, held.now_s)

    assert (checkpoint(*named) if named else None) == plan.parent


def test_a_shard_is_planned_with_the_live_nodes_that_hold_exactly_it(held, checkpoint):
    key = checkpoint(10, 1)
    earlier = tuple(row(checkpoint(step, 1)) for step in (10, 9, 8, 7, 6, 5))
    given = facts_of(held, key, earlier=earlier)
    item = parse("shard/0123456789ab/10/1/0/0")
    plan = worker_plans.plan(item, given, held.nodes, held.now_s)

    assert ["a", "b"] == [peer.node for peer in plan.sources]
    assert [9, 8, 7, 6] == [one.step for one in plan.earlier]
    assert given.shards[0] == plan.shard

    other = tuple(replace(s, root_digest=b"z" * 16) for s in given.shards)
    assert (
        () == worker_plans.plan(item, replace(given, shards=other), held.nodes, held.now_s).sources
    )
    away = worker_plans.plan(item, given, held.nodes, held.now_s + 100)
    assert () == away.sources, "who has no lease serves nothing"


def test_a_quarantined_copy_is_no_source(held):
    """F70."""
    node = held.nodes["a"]
    bad = tuple(
        HeldShard(shard=h.shard, state=HeldState.QUARANTINED, owner="a", slot_incarnation=1)
        for h in node.inventory.shards
    )
    nodes = {"a": replace(node, inventory=replace(node.inventory, shards=bad))}

    assert () == worker_plans.holders(bad[0].shard, nodes, held.now_s)
    assert () == worker_plans.repairs([bad[0].shard.id], nodes, held.now_s)


@pytest.mark.parametrize(
    ("kind", "changes", "facts", "planned"),
    [
        ("manifest", {"drain_at_s": 1.0}, {}, True),
        ("manifest", {"drain_at_s": 1.0}, {"missing_count": 1}, False),
        ("manifest", {}, {}, False),
        ("manifest", {"durable_at_s": 1.0}, {}, False),
        ("collect", {"durable_at_s": 1.0, "expired": True}, {}, True),
        ("collect", {"durable_at_s": 1.0}, {}, False),
        ("collect", {}, {}, False),
        ("scrub", {"durable_at_s": 1.0}, {}, True),
        ("scrub", {"durable_at_s": 1.0, "bad": True}, {}, True),
        ("scrub", {"durable_at_s": 1.0, "expired": True}, {}, False),
        ("scrub", {}, {}, False),
        ("scrub", {"durable_at_s": 1.0}, {"shards": ()}, False),
    ],
)
def test_an_old_item_asks_for_nothing(held, checkpoint, kind, changes, facts, planned):
    """P1: no manifest before all shards; nothing that is not expired is collected."""
    key = checkpoint(10, 1)
    given = facts_of(held, key, **{"row": row(key, **changes), **facts})
    plan = worker_plans.plan(Item(Kind(kind), key), given, held.nodes, held.now_s)

    assert planned == (plan is not None)
    if plan:
        assert (key, "j", given.shards) == (plan.checkpoint, plan.job, plan.shards)
        assert ('{"a":1}', 7.0) == (plan.notes, plan.created_at_s)


def test_orphans_are_older_than_a_time_and_not_on_their_way(checkpoint):
    plan = worker_plans.sweep([checkpoint(10, 1)], 500.0)

    assert ((checkpoint(10, 1),), 500.0) == (plan.draining, plan.before_s)
    assert 0.0 == worker_plans.sweep([], -5.0).before_s


def test_a_bad_shard_is_repaired_when_a_live_node_has_it(held):
    keys = [ShardId("0123456789ab", 10, 1, 0), ShardId("0123456789ab", 10, 1, 7)]
    assert ("shard/0123456789ab/10/1/0/0",) == worker_plans.repairs(keys, held.nodes, held.now_s)
    assert () == worker_plans.repairs(keys, held.nodes, held.now_s + 100)
