"""What saves and the restore cost: gathered from ranks, kept with the attempt, shown to people."""

import math
from dataclasses import fields, replace

import pytest
from tests.said import rank_status, tcp

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldShard, HeldState, Inventory, Peer
from holdfast.core.reports import BYTES_MAX, RankCosts
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.exposition import exposition
from holdfast_services.metadata.domain.costs import COSTS_REST_S
from holdfast_services.metadata.domain.inventory_limits import received
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.cost_figures import JOBS_COUNT_MAX, cost_families

ONE = RankCosts(stall_s=0.25, save_bytes=10)
OTHER = RankCosts(stall_s=0.5, save_bytes=20)


@pytest.fixture
def training(cluster):
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")
    return cluster


def say(cluster, one, other):
    cluster.status("a", 0, costs=one)
    cluster.status("b", 1, costs=other)
    cluster.report("a", "b")
    return cluster.run.attempt.costs


def test_a_figure_is_kept_with_the_attempt_as_soon_as_it_is_known(training):
    assert RankCosts() == training.run.attempt.costs
    say(training, ONE, OTHER)

    assert 0.25 <= training.run.attempt.costs.stall_s
    loaded = replace(OTHER, load_s=3.0)
    assert 3.0 == say(training, ONE, loaded).load_s


def test_what_only_changes_is_written_after_a_rest(training):
    """A row that follows each save would be written with each report."""
    say(training, ONE, ONE)
    kept = say(training, ONE, OTHER)
    assert kept == say(training, ONE, replace(OTHER, stall_s=9.0))

    training.later(COSTS_REST_S)
    assert 9.0 == say(training, ONE, replace(OTHER, stall_s=9.0)).stall_s


def test_the_last_figures_stay_when_the_attempt_has_ended(training):
    say(training, ONE, ONE)
    training.status("a", 0, costs=OTHER, live=False)
    training.status("b", 1, costs=OTHER, live=False)
    training.report("a", "b")
    training.machine("a").ranks.clear()
    training.report("a", "b")

    assert RankCosts(stall_s=0.5, save_bytes=40) == training.run.attempt.costs


def test_a_new_attempt_has_cost_nothing_yet(training):
    say(training, ONE, OTHER)
    training.register(0, "a", nonce=b"second")

    assert RankCosts() == training.run.attempt.costs


def test_every_cost_is_a_family_with_help_and_unit(training):
    say(training, ONE, OTHER)
    world = World(now_s=training.now_s, nodes=training.nodes, runs=(training.run,))
    text = exposition(cost_families(world))

    assert 'holdfast_attempt_stall_seconds{job="job"} 0.5\n' in text.replace(
        training.run.job, "job"
    )
    assert "_save_bytes{" in text
    assert "_load_seconds{" not in text, "what is not known has no line"
    assert len(fields(RankCosts)) + 1 == text.count("# HELP ") == text.count("# TYPE ")


def test_the_jobs_with_lines_of_their_own_are_bounded(training):
    say(training, ONE, OTHER)
    runs = tuple(
        replace(training.run, job=f"job{number:04}", attempt=replace(training.run.attempt))
        for number in range(JOBS_COUNT_MAX + 3)
    )
    text = exposition(cost_families(World(now_s=training.now_s, nodes=training.nodes, runs=runs)))

    assert JOBS_COUNT_MAX == text.count("holdfast_attempt_stall_seconds{")
    assert "holdfast_attempt_jobs_not_listed 3.0\n" in text


# -- what agents send --------------------------------------------------------------------------


def inventory(**said):
    peer = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
    return Inventory(node=peer, incarnation=1, sequence=1, **said)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 5e-324])
def test_a_rank_with_a_bad_clock_does_not_cost_its_node_the_report(value):
    status = rank_status(job="j", run="r1", generation=1, rank=0, step=3, step_s=value)
    taken = received(inventory(ranks=(status,)))

    assert (3, 0.0) == (taken.ranks[0].report.step, taken.ranks[0].report.step_s)


@pytest.mark.parametrize(
    "said", [{"plan_hash": "p\0"}, {"length_bytes": -1}, {"length_bytes": BYTES_MAX + 1}]
)
def test_a_shard_that_no_row_can_hold_is_refused(said):
    """It would end every later transaction of the job: the sum of lengths has 63 bits."""
    plain = {"job": "j", "world_size": 1, "plan_hash": "p", "length_bytes": 1}
    shard = Shard(id=ShardId("r1", 1, 1, 0), root_digest=b"d" * 16, **{**plain, **said})
    held = HeldShard(shard=shard, state=HeldState.SEALED, owner="a", slot_incarnation=1)

    with pytest.raises(InvalidRequestError, match="r1/1/1/0/0"):
        received(inventory(shards=(held,)))
