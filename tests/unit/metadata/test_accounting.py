"""What happens to a run, in its ledger: when its attempts train, how they end, what follows."""

from dataclasses import replace

import pytest
from tests.unit.metadata.test_failures import end, train

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.reports import RankCosts
from holdfast_services.metadata.domain.accounting import shown
from holdfast_services.metadata.domain.holds import removed
from holdfast_services.metadata.domain.ledger import Cause, Ledger, total


def spent(cluster):
    return total(shown(cluster.run, cluster.now_s, cluster.limits).months)


def test_a_job_that_trains_has_trained_until_now(cluster):
    train(cluster, b"first", seconds=30)

    assert spent(cluster).trained_s == 30.0
    assert cluster.run.ledger.months == (), "it is written when the attempt is over"


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
    cluster.run = replace(cluster.run, announcement=Announcement(step=5, reason=reason))
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
