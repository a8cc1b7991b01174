"""Spans of a checkpoint: one trace whoever sends them, or none (F112)."""

from __future__ import annotations

import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.servers.collector import running_collector

from holdfast.core.attempts import AttemptSpec
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.reports import RankCosts
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import InvalidRequestError
from holdfast_services.agent import traces as of_agent
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.state import Content
from holdfast_services.kit import otlp
from holdfast_services.kit.otlp import Traces
from holdfast_services.kit.settings import TraceSettings, load
from holdfast_services.kit.traces import open_traces
from holdfast_services.metadata import traces as of_metadata
from holdfast_services.metadata.domain.model import Attempt, Checkpoint, Run

SPEC = AttemptSpec(job="job", nonce=b"n", launcher="L", holder="", rank=0, world_size=1)
OF = CheckpointId("run", 5, 1)
ROW = Checkpoint(id=OF, world_size=2, plan_hash="p", length_bytes=8, local_at_s=10.0)
SHARD = Shard(
    id=ev.ShardId("run", 5, 1, 3), job="job", world_size=2, plan_hash="p", length_bytes=8,
    root_digest=b"d",
)  # fmt: skip


@pytest.fixture
def collector():
    with running_collector() as collector:
        yield collector


@pytest.fixture
def sent(collector):
    """Return what sends the spans that a function makes, and gives them back by name."""

    def send(make, *, service="agent", share=1.0):
        traces = Traces(collector.url, service, "n1", share)
        make(traces)
        traces.close()
        spans, collector.spans = collector.spans, []
        named = {span.name: span for _, span in spans}
        assert len(spans) == len(named)
        return named

    return send


def run_of(*rows):
    return Run(id="run", job="job", checkpoints=rows)


def about(span):
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_all_processes_put_a_checkpoint_into_one_trace(sent):
    """Nothing travels between them but its name."""
    root = sent(lambda traces: traces.began(OF, 10.0, job="job"), service="metadata")["checkpoint"]
    seal = sent(lambda traces: traces.ended("seal", OF, 0.5, end_s=9.5))["seal"]
    other = sent(lambda traces: traces.ended("seal", replace(OF, generation=2), 0.5))["seal"]

    assert root.trace_id == seal.trace_id
    assert b"" == root.parent_span_id
    assert root.span_id == seal.parent_span_id
    assert seal.span_id not in {root.span_id, other.span_id}
    assert other.trace_id != seal.trace_id
    assert (9_000_000_000, 9_500_000_000) == (seal.start_time_unix_nano, seal.end_time_unix_nano)
    named = {"holdfast.run": "run", "holdfast.step": 5, "holdfast.generation": 1}
    assert {**named, "holdfast.job": "job"} == about(root)


def test_after_a_root_others_have_numbers_of_their_own(sent):
    def make(traces):
        traces.began(OF, 10.0)
        traces.ended("one", OF, 0.5)
        traces.ended("other", OF, 0.5)

    spans = sent(make)
    assert 3 == len({span.span_id for span in spans.values()})


def test_what_ends_now_ends_now(sent):
    before_ns = time.time_ns()
    span = sent(lambda traces: traces.ended("fetch", OF, 0.5))["fetch"]
    assert before_ns - 1_000 <= span.end_time_unix_nano <= time.time_ns()
    assert 5e8 == pytest.approx(span.end_time_unix_nano - span.start_time_unix_nano, abs=1000)


def test_what_failed_says_with_what(sent):
    spans = sent(
        lambda traces: (traces.ended("a", OF, 1.0, error="unavailable"), traces.ended("b", OF, 1.0))
    )
    assert (Status.STATUS_CODE_ERROR, "unavailable") == (
        spans["a"].status.code,
        spans["a"].status.message,
    )
    assert Status.STATUS_CODE_UNSET == spans["b"].status.code


def test_a_share_of_the_checkpoints_is_traced_by_all_alike(collector):
    kept = []
    for service in ("agent", "metadata"):
        traces = Traces(collector.url, service, "n1", 0.5)
        for step in range(100):
            if service == "agent":
                traces.ended("seal", CheckpointId("run", step, 1), 0.5)
            else:
                traces.began(CheckpointId("run", step, 1), 10.0)
        traces.close()
        kept.append({span.trace_id for _, span in collector.spans})
        collector.spans.clear()

    assert kept[0] == kept[1]
    assert 30 < len(kept[0]) < 70


def test_the_catalogue_tells_of_its_levels(sent):
    replicated = replace(ROW, replicated_at_s=12.0, drain_at_s=13.0)
    durable = replace(replicated, durable_at_s=17.0, drain_at_s=None)

    def make(traces):
        of_metadata.tell(traces, run_of(), run_of(ROW))
        of_metadata.tell(traces, run_of(ROW), run_of(replicated))
        of_metadata.tell(traces, run_of(replicated), run_of(durable))

    spans = sent(make)
    times = {
        name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
        for name, span in spans.items()
    }
    assert {"checkpoint": (10, 10), "replicate": (10, 12), "persist": (13, 17)} == times
    assert 2 == about(spans["checkpoint"])["holdfast.ranks"]
    assert 8 == about(spans["checkpoint"])["holdfast.bytes"]


def test_what_a_manifest_has_told_of_is_not_a_new_checkpoint(sent):
    durable = replace(ROW, durable_at_s=12.0)
    assert {} == sent(lambda traces: of_metadata.tell(traces, run_of(), run_of(durable)))


def test_an_agent_tells_of_seals_and_copies(sent):
    name = SlotName("s0", 1, SlotState.SEALED)
    here = Content(shard=SHARD, owner="n1", digests=b"")
    copy = replace(here, source="peer")

    def make(traces):
        of_agent.tell(traces, [ev.SlotSealed(name, here)], 0.5)
        of_agent.tell(traces, [ev.FetchDone(name, copy)], 0.5)

    spans = sent(make)
    assert {"seal", "fetch"} == set(spans)
    told = about(spans["fetch"])
    assert ("job", 3, 8, "peer") == tuple(
        told[f"holdfast.{name}"] for name in ("job", "rank", "bytes", "source")
    )


def test_a_copy_that_failed_says_why(sent):
    failed = ev.FetchFailed(SlotName("s0", 1, SlotState.WRITING), SHARD.id, "no source answers")
    span = sent(lambda traces: of_agent.tell(traces, [failed], 0.5))["fetch"]
    assert "no source answers" == span.status.message
    assert 3 == about(span)["holdfast.rank"]


def test_a_restore_is_in_the_trace_of_what_it_read(sent):
    attempt = Attempt(generation=2, spec=SPEC, started_at_s=0.0, lease_until_s=0.0)
    costs = RankCosts(decide_s=1.0, fetch_s=2.0, load_s=4.0)
    loaded = replace(attempt, costs=costs, costs_at_s=30.0)
    decision = Decision(number=1, state=DecisionState.CONFIRMED, generation=2, checkpoint=OF)
    before = replace(run_of(ROW), attempt=attempt, decision=decision)

    def make(traces):
        traces.ended("seal", OF, 0.5)
        of_metadata.tell(traces, before, replace(before, attempt=loaded))

    spans = sent(make)
    restore = spans["restore"]
    assert spans["seal"].trace_id == restore.trace_id
    assert (23e9, 30e9) == (restore.start_time_unix_nano, restore.end_time_unix_nano)


def test_a_start_from_nothing_is_in_no_trace(sent):
    attempt = Attempt(generation=2, spec=SPEC, started_at_s=0.0, lease_until_s=0.0)
    loaded = replace(attempt, costs=RankCosts(load_s=4.0, stall_s=0.1))
    before = replace(run_of(ROW), attempt=attempt)
    assert {} == sent(
        lambda traces: of_metadata.tell(traces, before, replace(before, attempt=loaded))
    )


def test_a_collector_that_never_answers_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(otlp, "CLOSE_S_MAX", 0.1)
    monkeypatch.setattr(otlp, "EXPORT_S_MAX", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}", "agent", "n1", 1.0)
        for _ in range(1_000):
            traces.ended("seal", OF, 0.5)
        ending = threading.Thread(target=traces.close, daemon=True)
        ending.start()
        ending.join(20.0)  # the exporter itself gives up after 30
        assert not ending.is_alive(), "it waits for an answer"


def test_unless_asked_for_there_are_none():
    assert open_traces(load(TraceSettings, {}, "agent"), "agent", "n1") is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HOLDFAST_TRACES", "localhost:4318", "not the address of a collector"),
        ("HOLDFAST_TRACES_SHARE", "1.5", "not a share, from 0 to 1"),
        ("HOLDFAST_TRACES_SHARE", "nan", "not a share, from 0 to 1"),
        ("HOLDFAST_TRACES_SHARE", "all", "not a share, from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(name, value, text):
    with pytest.raises(InvalidRequestError, match=f"{name}=.*{text}"):
        load(TraceSettings, {name: value}, "agent")


def test_without_the_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "holdfast_services.kit.otlp", None)
    settings = TraceSettings(traces="http://127.0.0.1:4318", traces_share=1.0)
    with pytest.raises(InvalidRequestError, match=r"pip install 'holdfast\[traces\]'"):
        open_traces(settings, "agent", "n1")
