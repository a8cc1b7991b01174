"""`python -m holdfast_services.metadata` as users run it: gRPC, REST, the page, a clean end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.metadata.process import JOB, START_S_MAX, environment, start

from holdfast.core.inventory import Endpoint
from holdfast.errors import AlreadyExistsError
from holdfast.rpc.protocol import HEADER, PROTOCOL
from holdfast.v1 import common_pb2 as common
from holdfast.v1 import metadata_pb2 as pb


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    running = start(tmp_path_factory.mktemp("metadata"))
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture(scope="module")
def saved(service, kit):
    """What a node hears when a job of two ranks has replicated step 10."""
    return service.save(kit)


def test_a_handshake_names_rest(service):
    """F94."""
    answer = service.call("Handshake", common.HandshakeRequest())

    assert answer.rest_url == service.rest_url
    assert answer.protocol_min <= answer.protocol_max


def test_health_and_readiness(service):
    """F113."""
    assert service.http.get("/healthz").json() == {"status": "ok"}
    ends = time.monotonic() + 30
    while service.http.get("/readyz").status_code == 503 and time.monotonic() < ends:
        time.sleep(0.02)  # its first pulse
    assert service.http.get("/readyz").json() == {"status": "ready"}


def test_a_refusal_crosses_the_wire_as_our_error(service, saved):
    with pytest.raises(AlreadyExistsError, match="host:1"):
        service.register(0, "a", b"other", launcher="M")


def test_jobs_and_checkpoints_with_slashes_in_names(service, saved):
    """F92: every replica's node is named."""
    (job,) = service.http.get("/api/v1/jobs").json()
    assert job == service.http.get(f"/api/v1/jobs/{JOB}").json()
    assert (job["job"], job["newest_replicated_step"]) == (JOB, 10)

    (row,) = service.http.get(f"/api/v1/jobs/{JOB}/checkpoints").json()
    detail = service.http.get(f"/api/v1/jobs/{JOB}/checkpoints/10").json()

    assert row["level"] == "replicated"
    assert (row["length_bytes"], row["copies_min"], row["nodes"]) == (200, 2, ["a", "b"])
    assert [shard["owner"] for shard in detail["shards"]] == ["a", "b"]
    assert all({r["node"] for r in s["replicas"]} == {"a", "b"} for s in detail["shards"])


def test_errors_are_problem_json_with_the_stable_kind(service, saved):
    for path, code, kind in (
        ("/api/v1/jobs/none", 404, "not_found"),
        (f"/api/v1/jobs/{JOB}/checkpoints/11", 404, "not_found"),
        ("/api/v1/jobs/..%2f..", 400, "invalid_request"),
        (f"/api/v1/jobs/{JOB}/checkpoints/x", 400, "invalid_request"),
        ("/api/v1/nowhere", 404, "not_found"),
    ):
        answer = service.http.get(path)
        assert (answer.status_code, answer.json()["kind"]) == (code, kind), path
        assert answer.headers["content-type"] == "application/problem+json"


def test_nodes_tell_lease_and_budget(service, saved):
    nodes = service.http.get("/api/v1/nodes").json()

    assert [(n["node"], n["live"], n["used_bytes"]) for n in nodes] == [
        ("a", True, 200),
        ("b", True, 200),
    ]


def test_events_are_listed_and_streamed_from_where_the_reader_was(service, saved):
    """F111: Last-Event-ID resumes without a gap or a repeat."""
    listed = service.http.get(
        "/api/v1/events?limit=3", headers={"Accept": "application/json"}
    ).json()
    everything = service.http.get(
        "/api/v1/events?limit=1000", headers={"Accept": "application/json"}
    ).json()
    assert listed == everything[:3]
    first = everything[-1]["id"]

    seen = []
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(first)}
    with service.http.stream("GET", "/api/v1/events", headers=headers) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:])["id"])
            if len(seen) == len(everything) - 1:
                break

    assert seen == [event["id"] for event in reversed(everything)][1:]


def figures_of(service):
    """What the library that reads it makes of the text."""
    text = service.http.get("/metrics").text
    return {one.name: one for one in text_string_to_metric_families(text)}


def test_metrics_are_prometheus_text(service, saved):
    """F110."""
    families = figures_of(service)

    assert families["holdfast_nodes_live"].samples[0].value == 2
    assert families["holdfast_report_seconds"].samples[0].value >= 4
    assert all(one.documentation and one.type != "unknown" for one in families.values())


def test_metrics_count_nodes_with_rdma_and_fetches_that_went_another_way(service, saved, kit):
    """F110."""
    agent = kit.Agent("c")
    inventory = agent.inventory()
    endpoints = (Endpoint(kind="rdma", address="c:3"), *inventory.node.endpoints)
    service.report(replace(inventory, node=replace(inventory.node, endpoints=endpoints)))
    events = [
        pb.Event(kind=kind, severity="warning", message="m")
        for kind in ("transport_left", "fetch_failed", "transport_left")
    ]
    service.call("Record", pb.RecordRequest(node="c", events=events))
    families = figures_of(service)

    assert families["holdfast_nodes_serving_rdma"].samples[0].value == 1
    assert families["holdfast_transports_left"].samples[0].value == 2
    agent.leaving = True
    service.report(agent.inventory())


def test_the_page_asks_nobody_else(service):
    page = service.http.get("/").text

    assert "dashboard.js" in page
    assert "http://" not in page
    assert "https://" not in page


def test_openapi_describes_every_route(service):
    paths = service.http.get("/openapi.json").json()["paths"]

    assert {"/api/v1/jobs", "/api/v1/nodes", "/api/v1/events", "/readyz"} <= paths.keys()
    page = service.http.get("/docs")
    assert page.status_code == 200
    assert "/api/v1/jobs" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_sigterm_ends_it_cleanly_though_streams_and_watches_are_open(tmp_path):
    """A bounded shutdown: exit code 0."""
    running = start(tmp_path)
    opened = threading.Event()

    def follow():
        with (
            httpx.Client(base_url=running.rest_url, timeout=30) as http,
            http.stream("GET", "/api/v1/events") as stream,
        ):
            for _ in stream.iter_lines():
                opened.set()

    reader = threading.Thread(target=follow)
    reader.start()
    watch = running.stub.Watch.future(
        pb.WatchRequest(node="a", version="", wait_s=30), metadata=((HEADER, str(PROTOCOL)),)
    )
    assert opened.wait(20)
    assert watch.result(20).version

    assert running.stop() == 0
    reader.join(20)
    assert not reader.is_alive()


def test_a_store_without_a_queue_is_refused_at_the_start(tmp_path):
    """A clear error before anything is served, not a tier that never drains."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast_services.metadata"],
        env=environment(tmp_path) | {"HOLDFAST_STORE": f"file://{tmp_path / 'store'}"},
        capture_output=True,
        text=True,
        timeout=START_S_MAX,
        check=False,
    )

    assert done.returncode == 1
    assert "HOLDFAST_STORE is set without HOLDFAST_QUEUE" in done.stderr


def test_forget_memory_is_a_command_of_its_own(kit, tmp_path):
    """The supervisor runs it once the arenas are erased; other words are refused."""
    running = start(tmp_path)
    try:
        running.report(kit.Agent("a").inventory())
        assert len(running.http.get("/api/v1/nodes").json()) == 1
        codes = [
            subprocess.run(
                [sys.executable, "-m", "holdfast_services.metadata", word],
                env=environment(tmp_path),
                capture_output=True,
                timeout=START_S_MAX,
                check=False,
            ).returncode
            for word in ("forget-memory", "forget-memory", "remember")
        ]
        assert running.http.get("/api/v1/nodes").json() == []
    finally:
        running.stop()

    assert codes == [0, 0, 2]
