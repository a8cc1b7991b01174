"""The life of a checkpoint is one trace, of whoever had a part in it (F112)."""

from __future__ import annotations

from collections import defaultdict

import pytest
from tests.e2e.stack import running_stack
from tests.servers.collector import running_collector

ALL = {
    ("holdfast-metadata", "checkpoint"),
    ("holdfast-metadata", "replicate"),
    ("holdfast-metadata", "persist"),
    ("holdfast-metadata", "restore"),
    ("holdfast-agent", "seal"),
    ("holdfast-agent", "fetch"),
    ("holdfast-persistence", "shard item"),
    ("holdfast-persistence", "manifest item"),
}
WHOLE_S_MAX = 60.0
RUN = ("--wait", "replicated", "--persist", "5", "--wait-durable", "5")


@pytest.fixture(scope="module")
def collector():
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector):
    with running_stack(nodes=2, HOLDFAST_TRACES=collector.url) as running:
        yield running


def names(spans):
    """Return who has told of what, by trace."""
    found = defaultdict(set)
    for service, span in spans:
        found[span.trace_id].add((service, span.name))
    return found


def test_all_that_happens_to_a_checkpoint_is_in_its_trace(stack, job, collector):
    stack.ranks("--job", job, "--steps", "5", *RUN).succeed()
    stack.ranks("--job", job, "--steps", "6", *RUN).succeed()
    collector.until(lambda spans: ALL in names(spans).values(), WHOLE_S_MAX)

    by_trace = names(collector.spans)
    [whole] = [trace for trace, found in by_trace.items() if ALL <= found]
    spans = [span for _, span in collector.spans if span.trace_id == whole]
    [root] = [span for span in spans if span.name == "checkpoint"]
    others = [span for span in spans if span is not root]
    about = {one.key: one.value for one in root.attributes}
    assert (job, 5) == (
        about["holdfast.job"].string_value,
        about["holdfast.step"].int_value,
    )
    assert {root.span_id} == {span.parent_span_id for span in others}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
