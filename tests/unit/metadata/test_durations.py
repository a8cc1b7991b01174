"""What took how long, by a run before and after; and the histograms of it (F110)."""

from dataclasses import replace

import pytest

from holdfast.core.attempts import AttemptSpec
from holdfast.core.ids import CheckpointId
from holdfast.core.reports import RankCosts
from holdfast_services.metadata.domain.durations import Span, took
from holdfast_services.metadata.domain.model import Attempt, Checkpoint, Run
from holdfast_services.metadata.histograms import BUCKETS_S, JOBS_COUNT_MAX, Histograms, name

ROW = Checkpoint(
    id=CheckpointId("run", 5, 1), world_size=1, plan_hash="p", length_bytes=8, local_at_s=10.0
)  # fmt: skip
REPLICATED = replace(ROW, replicated_at_s=10.5)
DRAINING = replace(ROW, drain_at_s=11.0)
DURABLE = replace(ROW, durable_at_s=14.0)

SPEC = AttemptSpec(job="job", nonce=b"n", launcher="L", holder="", rank=0, world_size=1)


def run_of(*rows, costs=None, generation=1, job="job"):
    attempt = None
    if costs is not None:
        attempt = Attempt(
            generation=generation, spec=SPEC, started_at_s=0.0, lease_until_s=0.0,
            costs=costs,
        )  # fmt: skip
    return Run(id="run", job=job, checkpoints=rows, attempt=attempt)


def told(before, after):
    return [(one.span, one.seconds) for one in took(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((), (ROW,), []),
        ((), (REPLICATED,), [(Span.REPLICATE, 0.5)]),
        ((ROW,), (REPLICATED,), [(Span.REPLICATE, 0.5)]),
        ((REPLICATED,), (REPLICATED,), []),
        ((ROW,), (replace(ROW, replicated_at_s=9.0),), [(Span.REPLICATE, 0.0)]),
        ((ROW,), (DRAINING,), []),
        ((DRAINING,), (DURABLE,), [(Span.PERSIST, 3.0)]),
        ((DURABLE,), (DURABLE,), []),
        ((), (DURABLE,), []),  # a manifest has told of it
        ((DRAINING,), (), []),
    ],
)
def test_levels_take_what_lies_between_their_times(before, after, expected):
    assert told(run_of(*before), run_of(*after)) == expected


def test_costs_are_counted_when_they_change():
    none, first = RankCosts(), RankCosts(stall_s=0.25, copy_s=1.0)
    second = replace(first, stall_s=0.5, decide_s=1.0, fetch_s=2.0, load_s=4.0)

    assert told(run_of(costs=none), run_of(costs=first)) == [
        (Span.STALL, 0.25), (Span.COPY, 1.0),
    ]  # fmt: skip
    assert told(run_of(costs=first), run_of(costs=second)) == [
        (Span.STALL, 0.5), (Span.RESTORE, 7.0),
    ]  # fmt: skip
    assert list(took(run_of(costs=second), run_of(costs=second))) == []
    assert list(took(run_of(costs=first), run_of(costs=second, generation=2))) == []


def samples(histograms, span):
    [family] = [one for one in histograms.families() if one.name == name(span)]
    return {
        (s.name, *s.labels.values()): s.value
        for s in family.samples
        if not s.name.endswith("_created")  # which services switch off
    }


def test_histograms_are_by_job_and_of_a_bounded_number():
    counted = Histograms()
    for number in range(JOBS_COUNT_MAX + 2):
        counted.saved(run_of(ROW, job=f"{number}"), run_of(REPLICATED, job=f"{number}"))
    counted.saved(run_of(ROW, job="0"), run_of(REPLICATED, job="0"))

    found = samples(counted, Span.REPLICATE)
    family = name(Span.REPLICATE)
    assert found[f"{family}_count", "0"] == 2
    assert found[f"{family}_sum", "0"] == 1.0
    assert found[f"{family}_bucket", "0", "0.1"] == 0
    assert found[f"{family}_bucket", "0", "0.5"] == 2
    assert found[f"{family}_count", ""] == 2
    assert len(found) == (JOBS_COUNT_MAX + 1) * (len(BUCKETS_S) + 1 + 2)
