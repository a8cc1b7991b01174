"""What Prometheus is told by an agent, as it is run."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.protection import Copies

from .harness import WAIT_S, reported, until

MIB = 1 << 20
LENGTH = 20 * MIB


def samples(a) -> dict[tuple[str, str], float]:
    """Return the figures by name and what their labels say."""
    text = httpx.get(f"{a.ready['metrics_url']}/metrics", timeout=WAIT_S).text
    families = list(text_string_to_metric_families(text))
    assert all(one.documentation and one.type != "unknown" for one in families)
    return {
        (
            sample.name.removeprefix("holdfast_agent_"),
            ",".join(sample.labels.values()),
        ): sample.value
        for one in families
        for sample in one.samples
    }


def test_an_agent_tells_its_memory_its_copies_and_how_long_they_took(node, catalogue, saved):
    """F110: the bytes that one has served are those that the other has fetched."""
    a, b = (node(name, HOLDFAST_METRICS_LISTEN="0") for name in ("a", "b"))
    reported(catalogue, "a", "b")
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    _, _, shard = saved(a, length=LENGTH, replicas=1)
    until(lambda: catalogue.held("b").get(shard.id), "copy at b")

    owner, backup = samples(a), samples(b)
    assert LENGTH == owner["served_bytes_total", "tcp"] == backup["fetched_bytes_total", "tcp"]
    assert 0 == owner["fetched_bytes_total", "tcp"] == backup["served_bytes_total", "tcp"]
    assert (256 * MIB, 1) == (owner["budget_bytes", ""], owner["ranks", ""])
    assert owner["used_bytes", ""] == owner["promised_bytes", ""] > 0
    assert (1, 0) == (owner["slots", "sealed"], owner["slots", "closed"])
    assert (1, 0) == (owner["seal_seconds_count", ""], backup["seal_seconds_count", ""])
    assert 1 == backup["fetch_seconds_count", "peer"]
    assert (1, 0) == (owner["metadata_up", ""], owner["report_failures_total", ""])

    catalogue.stop()
    until(lambda: samples(a)["report_failures_total", ""] > 0, "a heartbeat fails")
    assert 0 == samples(a)["metadata_up", ""]


def test_figures_are_told_to_whom_every_service_answers(node):
    """A page of another site cannot read them through a browser on this machine."""
    url = f"{node('a', HOLDFAST_METRICS_LISTEN='0').ready['metrics_url']}/metrics"

    assert url.startswith("http://127.0.0.1:")
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        answer = httpx.get(url, headers=headers, timeout=WAIT_S)
        assert (403, "access") == (answer.status_code, answer.json()["kind"])


def test_an_agent_that_was_not_asked_to_listens_nowhere(node):
    assert "" == node("a").ready["metrics_url"]


def test_a_port_that_is_taken_is_named_and_nothing_begins(node):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}"):
            node("a", HOLDFAST_METRICS_LISTEN=str(port))
