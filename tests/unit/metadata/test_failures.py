"""The record of failures: what counts as one, and for how long attempts have trained (G7)."""

from dataclasses import replace

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.failure_record import FailureRecord


def train(cluster, nonce, *, seconds=100.0):
    """Let an attempt of two ranks begin, load and train; it reports every second."""
    cluster.join("a", "b")
    cluster.launch(nonce, "a", "b", launcher="L")
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, loaded=True)
    cluster.report("a", "b")
    for _ in range(round(seconds)):
        cluster.later(1.0)
        cluster.report("a", "b")


def end(cluster, **said):
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, live=False, **said)
    cluster.report("a", "b")


def test_a_job_that_never_trained_has_no_record(cluster):
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")

    assert FailureRecord() == cluster.run.record


def test_an_attempt_that_died_is_a_failure_once_another_follows(cluster):
    train(cluster, b"first")
    end(cluster)
    cluster.later(50.0)
    train(cluster, b"second", seconds=1)

    assert cluster.run.record == FailureRecord(failures_count=1, trained_s=100.0)


def test_what_the_catalogue_hears_again_of_an_attempt_that_has_ended_counts_once(cluster):
    """Agents repeat what ended sessions said: neither time nor failures grow by it."""
    train(cluster, b"first")
    end(cluster)
    for _ in range(5):
        cluster.later(1.0)
        cluster.report("a", "b")
    train(cluster, b"second", seconds=1)

    assert cluster.run.record == FailureRecord(failures_count=1, trained_s=100.0)


def test_an_attempt_that_closed_in_order_is_no_failure_but_its_time_counts(cluster):
    train(cluster, b"first")
    end(cluster, closed=True)
    train(cluster, b"second", seconds=1)

    assert cluster.run.record == FailureRecord(failures_count=0, trained_s=100.0)


def test_one_rank_that_did_not_close_is_a_failure(cluster):
    train(cluster, b"first")
    cluster.status("a", 0, live=False, closed=True)
    cluster.status("b", 1, live=False)
    cluster.report("a", "b")
    train(cluster, b"second", seconds=1)

    assert cluster.run.record.failures_count == 1


def test_an_attempt_that_fell_silent_trained_until_its_lease_was_renewed_last(cluster):
    """A node that is lost says nothing any more, nor do its ranks."""
    train(cluster, b"first")
    cluster.later(60.0)
    for node in "ab":
        cluster.wipe(node)
    train(cluster, b"second", seconds=1)

    record = cluster.run.record
    assert record.failures_count == 1
    assert 99.0 <= record.trained_s <= 101.0


def test_one_that_was_told_to_save_last_of_all_has_lost_nothing(cluster):
    """Preemption, and a round that ends for others to join: its launcher kills the ranks."""
    for reason in (SaveReason.PREEMPTION, SaveReason.RESCALE):
        train(cluster, reason.name.encode(), seconds=10)
        last = Announcement(step=5, reason=reason)
        cluster.run = replace(cluster.run, announcement=last, announced_at_s=cluster.now_s)
        end(cluster)
    train(cluster, b"last", seconds=1)

    assert cluster.run.record == FailureRecord(failures_count=0, trained_s=20.0)


def test_one_that_never_loaded_is_neither_failure_nor_training(cluster):
    """A script that fails at its start, again and again, loses no work that saves would save."""
    cluster.join("a", "b")
    for nonce in (b"1", b"2", b"3"):
        cluster.launch(nonce, "a", "b", launcher="L")
        end(cluster)

    assert FailureRecord() == cluster.run.record
