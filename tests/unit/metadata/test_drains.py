"""What becomes due for the object store, what is given up, what workers are told to do (G10)."""

from dataclasses import replace

import pytest
from tests.said import registration

from holdfast.core.persistence_rules import PersistRule, Retention
from holdfast.core.reports import StepNote
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain import drains
from holdfast_services.metadata.domain.model import MEMORY_ROWS_PER_RUN_MAX, NoParent
from holdfast_services.metadata.domain.shortage import NODE_AWAITED_S
from holdfast_services.metadata.domain.worker_plans import holders, items

EVERY_TEN = PersistRule(steps=10)


@pytest.fixture
def tier(cluster):
    """A cluster of two nodes with an object tier."""
    cluster.object_tier()
    cluster.join("a", "b")
    return cluster


def train(cluster, rule=EVERY_TEN, nonce=b"first"):
    return cluster.launch(nonce, "a", "b", persist=rule)


def drop(cluster, step, generation, *nodes):
    for node in nodes:
        for rank in (0, 1):
            cluster.drop(node, step, generation, rank)


@pytest.mark.parametrize(
    ("steps", "committed", "gone"),
    [
        (10, [5, 10, 15, 20, 25], [10, 20]),
        (10, [7, 14, 21, 28, 35], [14, 21, 35]),
        (10, [9, 9, 30, 31, 39, 40], [30, 40]),
        (1, [1, 2, 3], [1, 2, 3]),
        (100, [5, 99], []),
    ],
)
def test_the_first_step_committed_at_or_after_each_multiple_goes(tier, steps, committed, gone):
    """F85, G10: however steps and multiples lie, once per multiple passed."""
    generation = train(tier, PersistRule(steps=steps))
    went = []
    for step in committed:
        tier.commit(step, generation, "a", "b")
        for one in tier.draining():
            went.append(one)
            tier.finish(one, generation)

    assert gone == went


def test_of_steps_committed_at_once_the_first_due_one_goes(tier):
    """After an outage of metadata many inventories' worth of steps arrive together."""
    generation = train(tier)
    for step in (9, 10, 11):
        for node in ("a", "b"):
            for rank, owner in enumerate(("a", "b")):
                tier.hold(node, step, generation, rank, owner=owner)
    tier.report("a", "b")

    assert [10] == tier.draining()


def test_a_step_goes_when_the_seconds_since_the_last_one_are_over(tier):
    generation = train(tier, PersistRule(seconds=60))
    tier.commit(1, generation, "a", "b")
    assert [] == tier.draining()
    tier.now_s += 60
    tier.commit(2, generation, "a", "b")
    assert [2] == tier.draining()
    tier.finish(2, generation)
    tier.now_s += 59
    tier.commit(3, generation, "a", "b")
    assert [] == tier.draining()


def test_a_clock_that_steps_back_delays_a_step_by_one_interval_at_most(tier):
    """One clock, and it jumps an hour back: the interval begins again, it does not stand still."""
    generation = train(tier, PersistRule(seconds=60))
    tier.now_s += 60
    tier.commit(1, generation, "a", "b")
    tier.finish(1, generation)
    tier.now_s -= 3600
    tier.commit(2, generation, "a", "b")
    assert [] == tier.draining()
    tier.now_s += 60
    tier.commit(3, generation, "a", "b")

    assert [3] == tier.draining()


def test_either_rule_makes_a_step_due(tier):
    generation = train(tier, PersistRule(steps=10, seconds=60))
    tier.commit(10, generation, "a", "b")
    tier.finish(10, generation)
    tier.now_s += 60
    tier.commit(11, generation, "a", "b")

    assert [11] == tier.draining()


def test_only_whole_steps_go(tier):
    """P1: half a checkpoint is not committed, so it is not due either."""
    generation = train(tier)
    tier.hold("a", 10, generation, 0)
    tier.report("a", "b")

    assert [] == tier.draining()


def kept(cluster, *nodes):
    """Return (node, step, rank) of all that is kept for its way to the object store."""
    return {
        (node, int(key.step), int(key.rank))
        for node in nodes
        for key in cluster.view(node).runs[0].drained
    }


def test_a_draining_checkpoint_is_kept_by_the_owner_of_each_shard_until_it_is_durable(tier):
    """4.7: a worker reads it there; copies elsewhere go with their step, and cost no slot."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    for step in range(11, 30):
        tier.commit(step, generation, "a", "b")
    view = tier.view("b").runs[0]
    assert () == view.pinned
    assert {("a", 10, 0), ("b", 10, 1)} == kept(tier, "a", "b")
    named = {one.checkpoint.step: one for one in view.committed}
    assert named[10].draining
    assert not named[29].draining

    for rank in (0, 1):
        tier.shard_done(10, generation, rank)
    tier.finish(10, generation)
    view = tier.view("b").runs[0]
    assert {("a", 29, 0), ("b", 29, 1)} == kept(tier, "a", "b"), "the one that was postponed"
    assert {one.checkpoint.step: one.durable for one in view.committed}[10]


def test_another_holder_keeps_what_drains_while_the_owner_is_away_or_has_lost_it(tier):
    """4.7: and that is one of them; once the owner is back it is its again."""
    tier.join("c")
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.hold("c", 10, generation, 0, owner="a")
    tier.later(tier.limits.node_lease_s)
    tier.report("b", "c")
    assert {("b", 10, 0), ("b", 10, 1)} == kept(tier, "b", "c")

    tier.report("a")
    assert {("a", 10, 0), ("b", 10, 1)} == kept(tier, "a", "b", "c")

    tier.wipe("a")
    tier.report("a")
    assert {("b", 10, 0), ("b", 10, 1)} == kept(tier, "a", "b", "c")


def test_a_worker_asks_the_owner_first(tier):
    """It keeps what drains; others may let it go meanwhile."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    missing = tier.run.drains[0].missing

    asked = [holders(shard, tier.nodes, tier.now_s) for shard in missing]

    assert [["a", "b"], ["b", "a"]] == [[peer.node for peer in peers] for peers in asked]


def test_a_view_names_the_two_newest_durable_beside_the_newest(tier):
    generation = train(tier)
    for step in (10, 20, 30, *range(31, 39)):
        tier.commit(step, generation, "a", "b")
        for one in tier.draining():
            tier.finish(one, generation)
    named = [(one.checkpoint.step, one.durable) for one in tier.view("a").runs[0].committed]

    assert [(step, False) for step in range(38, 30, -1)] + [(30, True), (20, True)] == named


def test_while_one_is_on_its_way_the_next_is_postponed_once_and_a_later_one_goes(tier):
    """G10, F88: back-pressure costs object-tier saves only; it is said once per episode."""
    generation = train(tier)
    for step in (10, 20, 30):
        tier.commit(step, generation, "a", "b")
    assert [10] == tier.draining()
    assert 1 == tier.kinds().count("persist_postponed")
    assert {(s, generation) for s in (10, 20, 30)} == tier.levels().keys(), "memory waits for none"

    tier.finish(10, generation)
    assert [30] == tier.draining(), "the newest there is"
    tier.finish(30, generation)
    for step in (40, 50):
        tier.commit(step, generation, "a", "b")
    assert 2 == tier.kinds().count("persist_postponed"), "another episode"


def test_the_last_step_of_a_run_goes_though_nothing_is_committed_after_it(tier):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.commit(20, generation, "a", "b")
    tier.commit(21, generation, "a", "b")
    tier.finish(10, generation)

    assert [21] == tier.draining()


def test_an_owed_step_that_is_no_longer_held_waits_for_the_next_one(tier):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.commit(20, generation, "a", "b")
    drop(tier, 20, generation, "a", "b")
    tier.report("a", "b")
    tier.finish(10, generation)
    assert [] == tier.draining()
    tier.commit(23, generation, "a", "b")

    assert [23] == tier.draining()


def test_a_drain_is_given_up_when_nobody_holds_what_is_missing(tier):
    """The holders came back empty: said, and the next committed step goes instead."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    drop(tier, 10, generation, "a", "b")
    tier.report("a")
    assert [10] == tier.draining(), "b has it still"
    tier.report("b")
    assert [] == tier.draining()
    assert 1 == tier.kinds().count("persist_lost")
    tier.commit(11, generation, "a", "b")

    assert [11] == tier.draining()


def test_what_is_stored_already_needs_no_holder(tier):
    """A lost holder of a shard that lies in the object store changes nothing."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    for rank in (0, 1):
        tier.shard_done(10, generation, rank)
    drop(tier, 10, generation, "a", "b")
    tier.report("a", "b")

    assert [10] == tier.draining()
    assert ("manifest/0123456789ab/10/1",) == items(tier.run)


def test_a_silent_holder_is_waited_for(tier):
    """Its lease ran out, but its last word was that it holds the shard."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.later(100)

    assert [10] == tier.draining()


def test_a_holder_that_stays_away_is_given_up(tier):
    """G10: its node never comes back under that name, and the run's later steps still go."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    drop(tier, 10, generation, "a")
    tier.report("a")
    tier.later(drains.HOLDER_AWAY_S_MAX)
    assert [10] == tier.draining(), "its lease ended less long ago"
    tier.later(tier.limits.node_lease_s)
    tier.report("a")

    assert [] == tier.draining()
    assert 1 == tier.kinds().count("persist_lost")
    assert tier.run.persist_owed


def test_a_silent_holder_is_waited_for_no_longer_than_others_if_a_later_step_is_there_to_go(tier):
    """G10, M8: it was the only one that keeps a shard, and for ten minutes nothing became durable.

    20 was due meanwhile, and is whole on those that are there.
    """
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.commit(20, generation, "a", "b")
    drop(tier, 10, generation, "b")
    tier.report("b")
    assert tier.run.persist_owed
    tier.later(NODE_AWAITED_S)
    tier.report("b")
    assert [20] == tier.draining()
    assert 1 == tier.kinds().count("persist_lost")


def test_a_holder_that_was_silent_for_a_moment_keeps_its_drain(tier):
    """An agent's restart costs no upload, though a later step could go."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.commit(20, generation, "a", "b")
    drop(tier, 10, generation, "b")
    tier.report("b")
    tier.later(tier.limits.node_lease_s + 1)
    tier.report("b")

    assert [10] == tier.draining()


def test_without_a_store_nothing_stays_on_its_way(tier):
    """4.7: it was taken from the service's settings; the slots of a drain are not kept for ever."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.limits = replace(tier.limits, object_tier=False)
    tier.report("a")

    assert [] == tier.draining()
    assert () == tier.view("a").runs[0].pinned
    assert "HOLDFAST_STORE" in tier.events[-1].message


def test_another_copy_with_another_digest_is_no_holder(tier):
    """What was to be stored is gone; what is there now is another thing and begins anew."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    for node in ("a", "b"):
        tier.hold(node, 10, generation, 1, owner="b", digest=b"x" * 16)
    tier.report("a", "b")

    assert 1 == tier.kinds().count("persist_lost")
    assert b"x" * 16 == tier.run.drains[0].missing[1].root_digest


def test_a_drain_outlives_its_attempt(tier):
    """G12: not superseded, so it goes on while the next attempt decides and trains."""
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    train(tier, nonce=b"second")
    tier.ready(("a", 0), ("b", 1))

    assert ("CONFIRMED", (10, generation)) == tier.decided()
    assert [10] == tier.draining()


def test_a_superseded_drain_is_given_up_and_nothing_is_owed(tier):
    """P2: what a confirmed restore left behind goes nowhere."""
    generation = train(tier)
    tier.commit(5, generation, "a", "b")
    tier.commit(10, generation, "a", "b")
    drop(tier, 10, generation, "a")
    second = train(tier, nonce=b"second")
    for node in ("a", "b"):
        for rank in (0, 1):
            tier.accuse(node, 10, generation, rank, "b", tier.run.decision.number)
    drop(tier, 10, generation, "b")
    tier.hold("b", 10, generation, 1)
    tier.report("a", "b")
    assert (5, generation) == tier.decided()[1]
    tier.ready(("a", 0), ("b", 1))

    assert ("CONFIRMED", (5, generation)) == tier.decided()
    assert [] == tier.draining()
    assert 1 == tier.kinds().count("persist_lost")
    tier.commit(10, second, "a", "b")
    assert [10] == tier.draining(), "the same multiple comes again after an older step"


def test_without_an_object_tier_nothing_goes_and_it_is_said(cluster):
    """Loud: a user who asked for it hears that there is none."""
    cluster.join("a", "b")
    generation = train(cluster)
    cluster.commit(10, generation, "a", "b")

    assert [] == cluster.draining()
    assert 1 == cluster.kinds().count("persist_off")


def test_a_job_that_asks_for_nothing_keeps_all_in_memory(tier):
    """F86: on and off per job."""
    generation = train(tier, rule=None)
    tier.commit(10, generation, "a", "b")

    assert [] == tier.draining()
    assert "persist_off" not in tier.kinds()


def test_a_new_attempt_may_change_the_rule_and_keeps_the_policy_it_does_not_name(tier):
    tier.register(0, "a", persist=EVERY_TEN, retention=Retention(last=3))
    assert Retention(last=3) == tier.run.retention
    tier.register(0, "a", nonce=b"second", persist=PersistRule(steps=7))

    assert PersistRule(steps=7) == tier.run.attempt.spec.persist
    assert Retention(last=3) == tier.run.retention


@pytest.mark.parametrize(
    "rule", [PersistRule(steps=-1), PersistRule(seconds=-1.0), PersistRule(seconds=float("inf"))]
)
def test_rules_that_make_no_sense_are_refused(tier, rule):
    from holdfast_services.metadata.domain.attempts import check

    wish = registration(
        job="j", nonce=b"n", launcher="", holder="", takeover=False, rank=0, world_size=1,
        node="a", persist=rule,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="persist"):
        check(wish)


# -- lineage and notes -----------------------------------------------------------------------


def test_a_checkpoint_knows_what_its_attempt_had_restored(tier, checkpoint):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    second = train(tier, nonce=b"second")
    tier.ready(("a", 0), ("b", 1))
    tier.commit(11, second, "a", "b")

    assert NoParent.BEGAN is tier.row(10, generation).parent
    assert checkpoint(10, generation) == tier.row(11, second).parent


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ('{"loss": 0.5}', '{"loss": 0.5}'),
        ("[1]", ""),
        ("{", ""),
        ('{"loss": NaN}', ""),
        ('{"a": "' + "x" * 5000 + '"}', ""),
        ("[" * 3000, ""),
        ('{"a": 1, "a": 2}', ""),
        ('{"a": 1e999}', ""),
        ('{"a": "\\ud800"}', ""),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", ""),
    ],
)
def test_notes_of_rank_0_stay_with_the_checkpoint_if_they_are_a_small_object(tier, said, kept):
    """What no manifest can hold is dropped: no report and no drain fails for it (P4, G10)."""
    generation = train(tier)
    tier.status("a", 0, notes=(StepNote(step=10, json=said),))
    tier.status("b", 1, notes=(StepNote(step=10, json='{"not": "mine"}'),))
    tier.commit(10, generation, "a", "b")

    assert kept == tier.row(10, generation).notes


def test_notes_that_come_after_the_commit_are_taken_and_do_not_change_then(tier):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    tier.status("a", 0, notes=(StepNote(step=10, json='{"a": 1}'),))
    tier.report("a")
    tier.status("a", 0, notes=(StepNote(step=10, json='{"a": 2}'),))
    tier.report("a")

    assert '{"a": 1}' == tier.row(10, generation).notes


# -- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_memory_rows_never_push_out_durable_or_draining_ones(tier, durable):
    generation = train(tier)
    tier.commit(10, generation, "a", "b")
    if durable:
        tier.finish(10, generation)
    for step in range(11, 13 + MEMORY_ROWS_PER_RUN_MAX):
        for node in ("a", "b"):
            shards = tier.machine(node).shards
            for key in [key for key in shards if key.step not in (10, step - 1)]:
                del shards[key]
        tier.commit(step, generation, "a", "b")

    rows = {row.id.step: row for row in tier.run.checkpoints}
    assert rows[10].stored if durable else rows[10].draining
    safe = sum(row.draining or row.durable_at_s is not None for row in rows.values())
    assert len(rows) <= MEMORY_ROWS_PER_RUN_MAX + safe
