"""``persist=Auto()``: how long the catalogue waits between two drains (G7, G10)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.failure_record import FailureRecord
from holdfast.core.ids import CheckpointId
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.save_interval import optimum_s
from holdfast_services.metadata.domain.drain_interval import DRAIN_LOAD, due, interval_s, why
from holdfast_services.metadata.domain.model import Checkpoint, Run
from holdfast_services.metadata.edges.documents import job_doc

RULE = PersistRule(mtbf_s=7200.0, interval_s_min=1.0, interval_s_max=3600.0)


def drained(took_s, *, at_s=1000.0, record=FailureRecord()):  # noqa: B008 - a frozen value
    """A run whose last drain began at ``at_s`` and took so long."""
    row = Checkpoint(
        id=CheckpointId("r", 50, 1), world_size=1, plan_hash="p", length_bytes=1,
        local_at_s=at_s, durable_at_s=at_s + took_s,
    )  # fmt: skip
    return Run(
        id="r", job="j", generation=1, checkpoints=(row,), persisted_step=50, persisted_at_s=at_s,
        record=record,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("took_s", "record", "expected_s"),
    [
        (0.0, FailureRecord(), 1.0),
        (10.0, FailureRecord(), optimum_s(0.3, 7200.0)),
        (10.0, FailureRecord(failures_count=8), optimum_s(0.3, 800.0)),
        (10.0, FailureRecord(trained_s=7200.0), optimum_s(0.3, 14400.0)),
        (900.0, FailureRecord(), 1800.0),
        (9000.0, FailureRecord(), 3600.0),
    ],
)
def test_known_answers(took_s, record, expected_s):
    """The cost is 3 % of what the upload takes; half of the time there is none; within bounds."""
    assert DRAIN_LOAD == 0.03

    assert interval_s(RULE, drained(took_s, record=record), 2000.0) == pytest.approx(expected_s)


def test_the_next_one_is_due_when_the_interval_is_over_and_never_while_one_drains():
    run = drained(10.0)
    every_s = interval_s(RULE, run, 1000.0)

    assert not due(RULE, run, 1000.0 + every_s - 0.1)
    assert due(RULE, run, 1000.0 + every_s)
    assert not due(PersistRule(steps=10), run, 1e9)


def test_the_reason_names_the_upload_and_the_failures():
    run = drained(10.0, record=FailureRecord(failures_count=1, trained_s=3600.0))

    assert why(RULE, run, 2000.0) == (
        "every 57 s: an upload takes 10 s, 1 failure in 60 min of training and one assumed in "
        "2.0 h make one in 1.5 h"
    )
    assert not why(PersistRule(seconds=60.0), run, 2000.0)


@given(took_s=st.floats(0, 1e9), failures=st.integers(0, 1 << 40), trained_s=st.floats(0, 1e12))
def test_the_interval_stays_within_its_bounds(took_s, failures, trained_s):
    record = FailureRecord(failures_count=failures, trained_s=trained_s)

    assert 1.0 <= interval_s(RULE, drained(took_s, record=record), 2000.0) <= 3600.0


def test_a_job_drains_at_once_and_then_at_the_interval_of_what_that_took(cluster):
    """Steps that commit while one drains are not owed: the next one is due when it pays off."""
    cluster.object_tier()
    cluster.join("a", "b")
    generation = cluster.launch(b"first", "a", "b", persist=replace(RULE, interval_s_min=20.0))
    cluster.later(20.0)
    cluster.commit(1, generation, "a", "b")
    assert [1] == cluster.draining()

    cluster.later(100.0)
    cluster.commit(2, generation, "a", "b")
    cluster.finish(1, generation)
    assert not cluster.run.persist_owed
    went = {}
    for step in range(3, 40):
        cluster.later(10.0)
        cluster.commit(step, generation, "a", "b")
        if cluster.draining():
            went[step] = cluster.now_s
            cluster.finish(step, generation)

    shown = job_doc(cluster.run, cluster.world())
    assert shown.persists_every_s == 20.0
    assert shown.persists_why.startswith("every 20 s (best would be 0 s): an upload takes ")
    first = min(went)
    assert went[first] - 1020.0 >= 200.0, "an upload that took 100 s is not begun twice in 200"
    assert went[min(set(went) - {first})] - went[first] < 200.0, "the next one took no time"
    assert "persist_postponed" not in [event.kind for event in cluster.events]
