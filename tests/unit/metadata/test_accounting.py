"""What happens to a run, in its ledger: when its attempts train, how they end, what follows."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.metadata.conftest import Cluster
from tests.unit.metadata.test_failures import end, train

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.reports import RankCosts
from holdfast_services.metadata.domain.accounting import shown
from holdfast_services.metadata.domain.holds import removed
from holdfast_services.metadata.domain.ledger import Cause, Ledger, total
from holdfast_services.metadata.domain.rollback import rolled_back
from holdfast_services.metadata.edges.cost_figures import JOBS_COUNT_MAX
from holdfast_services.metadata.edges.ledgers import ledger_family


def spent(cluster):
    return total(shown(cluster.run, cluster.now_s).months)


def notice(cluster, reason):
    announced = Announcement(step=5, reason=reason)
    cluster.run = replace(cluster.run, announcement=announced, announced_at_s=cluster.now_s)


def test_a_job_that_trains_has_trained_until_now(cluster):
    train(cluster, b"first", seconds=30)

    assert spent(cluster).trained_s == 30.0
    assert cluster.run.ledger.months == (), "it is written when the attempt is over"
    cluster.later(0.3)
    assert spent(cluster).trained_s == pytest.approx(30.3), "until its lease is over"


def silence(cluster):
    """Of the ranks nobody says anything any more, not even that they have ended."""
    for node in "ab":
        cluster.wipe(node)
    cluster.report("a", "b")


def test_a_job_without_an_attempt_has_an_empty_ledger(cluster):
    assert shown(cluster.run, cluster.now_s) == Ledger()


def test_while_the_next_attempt_restores_what_was_trained_is_shown(cluster):
    train(cluster, b"first", seconds=30)
    end(cluster)
    cluster.launch(b"second", "a", "b", launcher="L")
    cluster.later(20.0)

    assert (spent(cluster).trained_s, spent(cluster).down_s) == (30.0, {})


def test_of_an_attempt_of_before_ledgers_nothing_is_invented(cluster):
    """A row of an older version, and ranks that say nothing any more."""
    train(cluster, b"first", seconds=30)
    silence(cluster)
    cluster.run = replace(cluster.run, ledger=Ledger())
    cluster.report("a", "b")
    assert cluster.run.ledger.since_s == cluster.run.attempt.started_at_s

    train(cluster, b"second", seconds=1)

    assert spent(cluster).trained_s == 1.0
    assert cluster.run.record.trained_s == 0.0


def test_a_lease_that_was_taken_away_does_not_come_back_by_silence(cluster):
    train(cluster, b"first", seconds=3)
    silence(cluster)
    attempt = replace(cluster.run.attempt, lease_until_s=0.0)
    cluster.run = replace(cluster.run, attempt=attempt)
    cluster.report("a", "b")

    assert cluster.run.attempt.lease_until_s == 0.0


def test_once_ranks_have_died_the_job_trains_no_more_and_is_down_when_it_is_back(cluster):
    train(cluster, b"first", seconds=30)
    end(cluster)
    cluster.later(20.0)
    assert (spent(cluster).trained_s, spent(cluster).down_s) == (30.0, {})

    train(cluster, b"second", seconds=10)

    assert spent(cluster).trained_s == 40.0
    assert spent(cluster).down_s == {Cause.PROCESS: 20.0}
    assert spent(cluster).lost_s == {Cause.PROCESS: 30.0}, "it had saved nothing"


def test_what_a_checkpoint_had_is_not_lost(cluster):
    train(cluster, b"first", seconds=30)
    cluster.commit(7, 1, "a", "b")
    cluster.later(5.0)
    end(cluster)
    cluster.later(1.0)
    train(cluster, b"second", seconds=1)

    assert cluster.run.decision.checkpoint.step == 7
    assert spent(cluster).lost_s == {Cause.PROCESS: 5.0}


@pytest.mark.parametrize("reason", [SaveReason.PREEMPTION, SaveReason.RESCALE])
def test_who_was_told_to_end_is_down_by_notice(cluster, reason):
    train(cluster, b"first", seconds=10)
    notice(cluster, reason)
    end(cluster)
    cluster.later(3.0)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).down_s == {Cause.NOTICE: 3.0}


def test_who_fell_silent_is_down_by_the_node_since_it_was_heard(cluster):
    train(cluster, b"first", seconds=10)
    cluster.later(60.0)
    for node in "ab":
        cluster.wipe(node)
    train(cluster, b"second", seconds=1)

    [(cause, down_s)] = spent(cluster).down_s.items()
    assert cause is Cause.NODE
    assert 59.0 <= down_s <= 61.0


def test_after_an_end_in_order_nothing_was_down(cluster):
    train(cluster, b"first", seconds=10)
    end(cluster, closed=True)
    cluster.later(500.0)
    train(cluster, b"second", seconds=1)

    assert (spent(cluster).down_s, spent(cluster).lost_s) == ({}, {})


def test_saves_that_training_waited_for_are_told_apart(cluster):
    train(cluster, b"first", seconds=10)
    for rank, stalled_s in enumerate((2.0, 3.0)):
        cluster.status("ab"[rank], rank, costs=RankCosts(stalled_s=stalled_s), live=False)
    cluster.report("a", "b")

    assert spent(cluster).stalled_s == 3.0
    assert spent(cluster).productive_s == 7.0


def test_one_rank_that_has_yet_to_restore_does_not_train(cluster):
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")
    cluster.status("a", 0, loaded=True)
    cluster.report("a", "b")
    cluster.later(5.0)

    assert cluster.run.ledger.since_s is None


def test_a_job_of_the_name_of_one_that_was_removed_has_a_ledger_of_its_own(cluster):
    train(cluster, b"first", seconds=10)
    end(cluster)
    cluster.run = removed(cluster.run)
    assert cluster.run.ledger == Ledger()

    cluster.later(60.0)
    train(cluster, b"second", seconds=5)

    assert (spent(cluster).trained_s, spent(cluster).down_s) == (5.0, {})


def figures(cluster):
    [family] = ledger_family(cluster.world())
    return {(s.labels["kind"], s.labels["cause"]): s.value for s in family.samples}


def test_prometheus_sees_all_of_it_by_kind_and_cause_and_nothing_of_a_job_that_was_removed(cluster):
    train(cluster, b"first", seconds=10)
    end(cluster)
    cluster.later(4.0)
    train(cluster, b"second", seconds=2)
    cluster.status("a", 0, costs=RankCosts(stalled_s=1.0))
    cluster.report("a", "b")

    assert figures(cluster) == {
        ("productive", ""): 1.0, ("stalled", ""): 1.0,
        ("lost", "process"): 10.0, ("down", "process"): 4.0,
    }  # fmt: skip
    cluster.run = removed(cluster.run)
    assert figures(cluster) == {}


def test_of_more_jobs_than_have_lines_the_first_by_name_have(cluster):
    train(cluster, b"first", seconds=1)
    names = [f"job{number:03}" for number in range(JOBS_COUNT_MAX + 5)]
    runs = tuple(replace(cluster.run, job=name) for name in reversed(names))

    [family] = ledger_family(replace(cluster.world(), runs=runs))

    told = list(dict.fromkeys(sample.labels["job"] for sample in family.samples))
    assert told == names[:JOBS_COUNT_MAX]


def test_who_was_told_to_save_and_not_to_end_died_of_something_else(cluster):
    train(cluster, b"first", seconds=10)
    notice(cluster, SaveReason.OPERATOR)
    end(cluster)
    cluster.later(3.0)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).down_s == {Cause.PROCESS: 3.0}


def test_what_an_attempt_waited_for_its_saves_is_known_after_it(cluster):
    train(cluster, b"first", seconds=10)
    end(cluster, costs=RankCosts(stalled_s=4.0), closed=True)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).stalled_s == 4.0


def test_who_trained_on_for_hours_after_a_notice_was_not_ended_by_it(cluster):
    """A preemption that was called off, and ranks that died the day after."""
    train(cluster, b"first", seconds=5)
    notice(cluster, SaveReason.PREEMPTION)
    cluster.later(4000.0)
    cluster.report("a", "b")
    end(cluster)
    cluster.later(3.0)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).down_s == {Cause.PROCESS: 3.0}


def outage(cluster, seconds):
    """The catalogue is away; once it is back it prolongs all leases, as if all had been heard."""
    cluster.now_s += seconds
    until_s = cluster.now_s + cluster.limits.node_lease_s
    attempt = replace(cluster.run.attempt, lease_until_s=until_s)
    cluster.run = replace(cluster.run, attempt=attempt)


def test_who_died_while_the_catalogue_was_away_did_not_train_until_it_was_back(cluster):
    """A machine, or a whole cluster, that was off over night: all of that time it was down."""
    train(cluster, b"first", seconds=10)
    outage(cluster, 50_000.0)
    for node in "ab":
        cluster.wipe(node)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).trained_s == 11.0
    assert spent(cluster).down_s == {Cause.NODE: 50_000.0}
    assert cluster.run.record.trained_s == 10.0


def test_who_trained_on_while_the_catalogue_was_away_has_trained_all_the_time(cluster):
    train(cluster, b"first", seconds=10)
    outage(cluster, 50_000.0)
    cluster.report("a", "b")
    cluster.later(60.0)

    assert spent(cluster).trained_s == 50_010.0


def usable(cluster):
    return [row for row in cluster.run.checkpoints if cluster.run.usable(row.id)]


def roll_back(cluster, step=None):
    row = next(row for row in usable(cluster) if step in (None, row.id.step))
    cluster.run = rolled_back(cluster.run, row).run
    cluster.settle()


def test_a_job_that_is_rolled_back_while_it_trains_has_trained_until_then(cluster):
    train(cluster, b"first", seconds=10)
    cluster.commit(7, 1, "a", "b")
    cluster.later(20.0)
    cluster.report("a", "b")
    roll_back(cluster)
    assert spent(cluster).trained_s == 30.0

    cluster.later(8.0)
    train(cluster, b"second", seconds=1)

    assert spent(cluster).trained_s == 31.0
    assert spent(cluster).lost_s == {Cause.NODE: 20.0}
    assert spent(cluster).down_s == {Cause.NODE: 8.0}
    assert cluster.run.record.trained_s == 30.0


def test_what_was_done_after_the_step_that_is_gone_back_to_is_lost(cluster):
    train(cluster, b"first", seconds=10)
    cluster.commit(7, 1, "a", "b")
    cluster.later(20.0)
    cluster.deaf |= {"a", "b"}
    cluster.commit(9, 1, "a", "b")
    cluster.later(2.0)
    cluster.report("a", "b")
    roll_back(cluster, 7)
    restored(cluster, b"second")

    assert cluster.run.decision.checkpoint.step == 7
    assert spent(cluster).lost_s == {Cause.NODE: 22.0}


def test_an_attempt_of_which_a_rank_has_not_come_yet_does_not_train(cluster):
    cluster.join("a", "b")
    cluster.register(0, "a")
    cluster.status("a", 0, loaded=True)
    cluster.report("a")

    assert cluster.run.ledger.since_s is None


def test_what_is_said_of_a_dead_rank_does_not_keep_the_one_that_fell_silent_alive(cluster):
    """Of one rank an agent says for hours that it has died, of the other nobody says anything."""
    train(cluster, b"first", seconds=10)
    cluster.status("a", 0, live=False)
    for _ in range(30):
        cluster.later(1.0)
        cluster.report("a")

    assert spent(cluster).trained_s == 10.0


def test_what_is_reported_again_is_counted_once(cluster):
    train(cluster, b"first", seconds=10)
    end(cluster)
    for _ in range(3):
        cluster.later(1.0)
        cluster.deliver(cluster.inventory("a"))
        cluster.report("b", "a")

    assert spent(cluster).trained_s == 10.0


ENDS = ("closed", "died", "silent", "off", "noticed", "rolled back", "taken over")


def restored(cluster, nonce):
    """Begin an attempt that has restored what it was told to."""
    cluster.join("a", "b")
    cluster.launch(nonce, "a", "b", launcher="L")
    if cluster.run.deciding:
        cluster.ready(("a", 0), ("b", 1))
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, loaded=True)
    cluster.report("a", "b")


def over(cluster, how, wait_s):
    """End what trains, one way or another, and let time pass."""
    if how == "noticed":
        notice(cluster, SaveReason.PREEMPTION)
    if how in ("closed", "died", "noticed"):
        end(cluster, closed=how == "closed")
    elif how == "rolled back" and usable(cluster):
        roll_back(cluster)
    elif how == "off":
        outage(cluster, wait_s)
    if how in ("silent", "off"):
        for node in "ab":
            cluster.wipe(node)
    cluster.later(wait_s)


HISTORY = st.lists(
    st.tuples(st.sampled_from(ENDS), st.integers(0, 5), st.integers(0, 40), st.booleans(),
              st.floats(0, 50), st.booleans()),
    min_size=1, max_size=5,
)  # fmt: skip


@given(HISTORY)
@settings(max_examples=25, deadline=None)
def test_all_time_of_a_job_is_productive_stalled_lost_or_down(history):
    """From its first step to its last word, but for that after an attempt that closed in order."""
    cluster, began_s, idle_s, closed_s = Cluster(), None, 0.0, None
    for number, (how, train_s, wait_s, saves, stalled_s, never) in enumerate(history):
        if never:
            cluster.join("a", "b")
            cluster.launch(b"never%d" % number, "a", "b", launcher="L")
            cluster.later(1.0)
        restored(cluster, b"%d" % number)
        began_s = cluster.now_s if began_s is None else began_s
        idle_s += 0.0 if closed_s is None else cluster.now_s - closed_s
        cluster.later(train_s)
        for rank, node in enumerate("ab"):
            cluster.status(node, rank, costs=RankCosts(stalled_s=stalled_s))
        if saves:
            cluster.commit(7 * (number + 1), cluster.run.generation, "a", "b")
        cluster.report("a", "b")
        closed_s = cluster.now_s if how == "closed" else None
        over(cluster, how, wait_s)
    restored(cluster, b"last")
    idle_s += 0.0 if closed_s is None else cluster.now_s - closed_s
    assert cluster.run.ledger.since_s == cluster.now_s

    of_it = spent(cluster)

    down_s = sum(of_it.down_s.values())
    assert of_it.trained_s + down_s == pytest.approx(cluster.now_s - began_s - idle_s, abs=1e-6)
    parts = (of_it.productive_s, of_it.stalled_s, *of_it.lost_s.values())
    assert sum(parts) == pytest.approx(of_it.trained_s, abs=1e-6)
