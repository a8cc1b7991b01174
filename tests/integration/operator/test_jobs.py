"""HoldfastJobs from their creation to their end: real scheduler, metadata, agents and launchers.

The API server is kmock, or a real one in ``make test-kubernetes``; the kubelet is one of ours (F95,
F105, F107, ADR 0069).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.e2e.stack import environment, running_stack, until
from tests.integration.operator.cluster import CORE, Kubelet, api_server, node_of
from tests.servers.processes import free_port

from holdfast_services.operator.domain.names import FINALIZER

FOREVER = "signal.signal(signal.SIGTERM, lambda *_: (mark('saved'), sys.exit(0)))\nforever()"
PRELUDE = """
import os, pathlib, signal, sys, time
FOLDER = pathlib.Path(os.environ["FOLDER"])
def mark(name):
    (FOLDER / f"mark-{os.environ['RANK']}-{name}").touch()
def forever():
    while True:
        signal.pause()
mark("began")
"""


class Cluster:
    """Two nodes with four GPUs each, as far as anybody knows."""

    def __init__(self, stack):
        self.stack, self.folder = stack, stack.home
        self.api = api_server()
        sockets = {one["name"]: one["agent"] for one in stack.info["nodes"]}
        for name in sockets:
            self.api.add_node(name, gpus=4)
        paths = {"PYTHONPATH": environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
        self.kubelet = Kubelet(self.api, self.folder, sockets, paths)
        listen = f"127.0.0.1:{free_port()}"
        scheduler = self._start(
            "scheduler",
            HOLDFAST_DATABASE_URL=f"sqlite:///{self.folder / 'scheduler.db'}",
            HOLDFAST_ADDRESS=stack.info["address"], HOLDFAST_REST_LISTEN=listen,
            HOLDFAST_PLAN_S="1", HOLDFAST_POLICY="fifo",
        )  # fmt: skip
        operator = self._start(
            "operator", HOLDFAST_SCHEDULER=f"http://{listen}", **self.api.environment
        )
        self.services = (operator, scheduler)

    def _start(self, service, **settings):
        with (self.folder / f"{service}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"holdfast_services.{service}"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment(**settings),
            )  # fmt: skip

    def close(self):
        codes = []
        for service in self.services:
            service.send_signal(signal.SIGTERM)
            codes.append(service.wait(60))
        self.kubelet.close()
        self.api.close()
        assert codes == [0, 0], self.said()

    def said(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"{path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in logs
        )


@pytest.fixture(scope="module")
def cluster():
    with running_stack(2) as stack:
        made = Cluster(stack)
        try:
            yield made
        finally:
            made.close()


class Job:
    """One HoldfastJob."""

    def __init__(self, cluster, folder, text="pass", gpus=1, **spec):
        (folder / "train.py").write_text(PRELUDE + text)
        self.cluster, self.folder, self.api = cluster, folder, cluster.api
        self.name = f"job-{os.urandom(3).hex()}"
        environment = {"FOLDER": str(folder)}
        given = {"gpusMin": gpus, "gpusMax": gpus, "graceSeconds": 5, "folder": str(folder)}
        self.path = self.api.add_job(
            self.name, **{"command": ["--no-standby", "train.py"], "environment": environment,
                          **given, **spec},
        )  # fmt: skip

    @property
    def object(self):
        return self.api.ask("GET", self.path)

    @property
    def status(self):
        return self.object.get("status") or {}

    def condition(self, kind):
        found = (one for one in self.status.get("conditions", ()) if one["type"] == kind)
        return next(found, {"status": "", "reason": "", "message": ""})

    def pods(self):
        label = "holdfast.dev/job"
        return [one for one in self.api.pods() if one["metadata"]["labels"][label] == self.name]

    def marks(self):
        return sorted(path.name for path in self.folder.glob("mark-*"))

    def until(self, met, what):
        try:
            return until(met, what, 100.0)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.object}\n{self.cluster.said()}") from late

    def until_finished(self, reason):
        self.until(lambda: self.condition("Finished")["status"] == "True", "it is finished")
        assert self.condition("Finished")["reason"] == reason, self.condition("Finished")


WAITS = "while not (FOLDER / 'go').exists():\n    time.sleep(0.05)"
JOBS = {
    "gang": {"text": WAITS, "gpus": 5},
    "failing": {"text": "raise ValueError('bad batch')"},
    "evicted": {"text": "if not (FOLDER / 'again').exists():\n    forever()"},
    "deleted": {"text": FOREVER},
    "bad": {"environment": {"1x": "a"}},
    "large": {"gpus": 100},
}


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    """All at once: each test looks at one of them."""
    return {n: Job(cluster, tmp_path_factory.mktemp(n), **what) for n, what in JOBS.items()}


def test_a_job_trains_on_the_nodes_that_it_was_granted_until_it_is_finished(cluster, jobs):
    """Gang: a launcher on each node, and one round of both; then nothing of it is left."""
    job = jobs["gang"]
    job.until(lambda: len(job.marks()) == 5, "all ranks train")
    job.until(lambda: job.condition("Running")["status"] == "True", "it is told")
    assert FINALIZER in job.object["metadata"]["finalizers"]
    assert job.status["nodes"].keys() == {"node-0", "node-1"}
    assert {node_of(pod) for pod in job.pods()} == {"node-0", "node-1"}
    assert job.marks() == [f"mark-{rank}-began" for rank in range(5)]

    (job.folder / "go").touch()
    job.until_finished("Ended")
    job.until(lambda: not job.pods(), "its pods are let go")
    assert job.status["gpus"] == 0
    events = cluster.api.ask("GET", f"{CORE}/events")["items"]
    reasons = {one["reason"] for one in events if one["involvedObject"]["name"] == job.name}
    assert {"Running", "Ended"} <= reasons


def test_a_pod_that_is_evicted_is_no_failure_of_the_job(cluster, jobs):
    """F105: the job goes on with another pod, and ends well."""
    job = jobs["evicted"]
    job.until(job.marks, "it trains")
    (pod,) = job.pods()
    (job.folder / "again").touch()
    cluster.kubelet.evict(pod["metadata"]["name"])

    job.until_finished("Ended")


def test_a_script_that_fails_is_told_with_its_exception(jobs):
    job = jobs["failing"]
    job.until_finished("Failed")

    assert "ValueError: bad batch" in job.condition("Finished")["message"]


def test_what_the_scheduler_does_not_take_on_is_told_in_its_words(jobs):
    bad, large = jobs["bad"], jobs["large"]
    bad.until(lambda: bad.condition("Accepted")["reason"] == "Refused", "it is refused")
    large.until(lambda: "100" in large.condition("Accepted")["message"], "it does not fit")

    assert bad.condition("Accepted")["message"] == "environment: '1x' is no variable"
    assert large.condition("Accepted")["reason"] == "Waiting"
    assert "GPUs" in large.condition("Accepted")["message"]


def test_a_deleted_job_saves_once_more_and_leaves_nothing(cluster, jobs):
    job = jobs["deleted"]
    job.until(job.marks, "it trains")
    for one in jobs.values():
        cluster.api.ask("DELETE", one.path)
    for one in jobs.values():
        one.until(lambda one=one: one.object is None, "the object goes")
        assert not one.pods()

    assert "mark-0-saved" in job.marks()
