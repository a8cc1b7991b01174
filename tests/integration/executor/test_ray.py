"""`holdfast execute --ray` on a real Ray: the suite of actuators, and what only Ray can do."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup
from tests.contract.actuators import ActuatorSuite
from tests.contract.executor_rig import Rig
from tests.integration.launcher.harness import PACKAGES, ROOT, kill

from holdfast import locks
from holdfast.core.executions import Outcome
from holdfast.errors import PreconditionError
from holdfast.executor.ray_cluster import NAMESPACE, RESERVATION, RayCluster, RayOptions
from holdfast.executor.ray_shape import bundles

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
LATE_S = 100.0
STORE_BYTES = 80_000_000  # Ray's least
HERE = f"{ROOT / 'sdk'}:{PACKAGES}"


def until(met, what):
    ends_s = time.monotonic() + LATE_S
    while not met():
        assert time.monotonic() < ends_s, what() if callable(what) else what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster_address():
    """One Ray for all tests, with places for two ranks, and nothing where another might be."""
    folder = tempfile.mkdtemp(prefix="hf-ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray makes one in the home
        patch.setenv("RAY_worker_niceness", "0")  # 15, which beside other tests is minutes
        patch.delenv("RAY_ADDRESS", raising=False)
        on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts its own in the place
        context = ray.init(
            num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=STORE_BYTES,
            _node_ip_address="127.0.0.1", _temp_dir=folder, namespace=NAMESPACE,
            log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        try:
            yield context.address_info["address"]
        finally:
            ray.shutdown()
            signal.signal(signal.SIGTERM, on_sigterm)
            os.environ.pop("RAY_AUTH_MODE", None)  # which it has set
            shutil.rmtree(folder, ignore_errors=True)


class RayRig(Rig):
    """A node of Ray's with its actor and its executor, and who orders."""

    def __init__(self, folder):
        super().__init__(folder)
        self.environment = {"FOLDER": str(folder)}
        self.execute = folder / "execute"
        self.cluster = None

    def options(self, **what):
        return RayOptions(
            **{
                "address": "auto", "gpus": 2, "nodes": 1, "folder": str(self.execute),
                "words": ("--scheduler", f"http://127.0.0.1:{self.server.server_port}"),
                "environ": {"HOLDFAST_AGENT": str(self.agent.socket)}, **what,
            }
        )  # fmt: skip

    def begin(self, **what):
        """Reserve the node, or find it reserved, and have its actor."""
        self.reports_since_begin = 0
        self.cluster = RayCluster(self.options(**what))
        self.cluster.reserve()
        until(self.cluster.is_ready, "Ray reserves it")

    def kill(self):
        """Kill executor and actor; Ray starts the actor again."""
        for pid in (self.pid("ray"), self.pid("executor")):
            kill(pid)

    def pid(self, of):
        until(lambda: self.holder(of), lambda: (f"there is {of}", self.said()))
        return self.holder(of)

    def holder(self, of):
        return locks.holder_of(self.execute / f"{of}.lock")

    def check(self):
        pass

    def said(self):
        logs = [
            self.folder / "command.log",
            self.execute / "executor.log",
            *(self.execute / "logs").glob("*"),
        ]
        return "\n".join(path.read_text(errors="replace") for path in logs if path.exists())

    def close(self):
        if self.cluster is not None and is_reserved():
            until(self.is_over, lambda: (self.cluster.states, self.said()))
            self.cluster.remove()
            until(lambda: not is_reserved(), "it is free again")
        self.agent.stop()
        self.server.shutdown()
        self.server.server_close()

    def is_over(self):
        self.cluster.turn(ending=True)
        return self.cluster.is_over()


def is_reserved():
    with contextlib.suppress(ValueError):
        ray.util.get_placement_group(RESERVATION)
        return True
    return False


@pytest.fixture
def rig(cluster_address):
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    made = RayRig(folder)
    try:
        yield made
        made.close()
        until(lambda: not made.left(), lambda: ("something is left", made.left(), made.said()))
    finally:
        for of in ("ray", "executor"):
            if pid := made.holder(of):
                kill(pid)
        shutil.rmtree(folder, ignore_errors=True)


class TestRay(ActuatorSuite):
    """The suite."""


def running(rig, start):
    return any(one.start == start and one.outcome is Outcome.RUNNING for one in rig.report.launches)


def test_a_killed_actor_comes_back_to_the_same_executor(rig):
    rig.script("forever()")
    rig.begin()
    rig.order(1, start=1)
    rig.until(lambda: len(rig.marks()) == 1, "it runs")
    actor, executor = rig.pid("ray"), rig.pid("executor")
    kill(actor)
    rig.until(lambda: rig.holder("ray") not in (None, actor), "Ray starts another actor")

    assert rig.holder("executor") == executor
    assert len(rig.marks()) == 1
    assert rig.left(), "it trains on"


def test_a_killed_executor_is_started_again_and_goes_on(rig):
    rig.script("forever()")
    rig.begin()
    rig.order(1, start=1)
    rig.until(lambda: len(rig.marks()) == 1, "it runs")
    rig.reports_since_begin = 0
    kill(rig.pid("executor"))
    rig.until(lambda: rig.reports_since_begin and running(rig, 1), "another one adopts it")

    assert len(rig.marks()) == 1


def test_when_the_reservation_is_removed_by_others_its_jobs_save_and_end(rig):
    """Ray gives the GPUs to others then; nothing of ours may be left on them."""
    rig.script("signal.signal(signal.SIGTERM, lambda *_: (mark('saved'), sys.exit(0)))\nforever()")
    rig.begin(hold_s=0.5)
    rig.order(1, start=1)
    rig.until(lambda: len(rig.marks()) == 1, "it runs")
    ray.util.remove_placement_group(ray.util.get_placement_group(RESERVATION))
    rig.until(lambda: not rig.left(), "it has ended")

    assert "saved" in rig.marks()
    rig.until(lambda: not rig.holder("executor"), "its executor, too")
    with pytest.raises(PreconditionError, match="somebody has removed"):
        until(lambda: rig.cluster.turn(ending=False), "it is seen")


def test_all_nodes_are_reserved_or_none_and_another_shape_is_refused(rig, capsys):
    rig.cluster = RayCluster(rig.options(nodes=2))
    rig.cluster.reserve()

    assert not rig.cluster.is_ready()
    assert "waiting until Ray can reserve 2 nodes with 2 CPUs" in capsys.readouterr().err
    assert not rig.execute.exists(), "nothing began on the one that is there"
    with pytest.raises(PreconditionError, match="2 nodes with 2 CPUs, not of 2 nodes with 1 CPU"):
        RayCluster(rig.options(nodes=2, gpus=1)).reserve()
    ray.util.remove_placement_group(ray.util.get_placement_group(RESERVATION))
    with pytest.raises(PreconditionError, match="somebody has removed"):
        until(rig.cluster.is_ready, "what was removed is not waited for")


def test_two_commands_at_once_have_one_reservation(rig, monkeypatch):
    rig.cluster, other = (RayCluster(rig.options(nodes=2)) for _ in range(2))

    def meanwhile(*what):
        monkeypatch.undo()
        other.reserve()
        return bundles(*what)

    monkeypatch.setattr("holdfast.executor.ray_cluster.bundles", meanwhile)
    rig.cluster.reserve()
    assert rig.cluster._group.id == other._group.id

    rig.cluster.remove()
    with pytest.raises(PreconditionError, match="somebody has removed"):
        until(other.is_ready, "what the first has ended is not waited for")
    other._group = PlacementGroup(PlacementGroupID.from_random())
    with pytest.raises(PreconditionError, match="somebody has removed"):
        until(other.is_ready, "nor what a cluster that has begun anew does not know")


def test_jobs_of_a_ray_node_that_dies_save_and_end(rig, cluster_address):
    rig.script("signal.signal(signal.SIGTERM, lambda *_: (mark('saved'), sys.exit(0)))\nforever()")
    words = ["--address", cluster_address, "--num-cpus", "3", "--block", "--object-store-memory",
             str(STORE_BYTES), "--disable-usage-stats"]  # fmt: skip
    with (rig.folder / "ray.log").open("wb") as log:
        node = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": HERE, "RAY_worker_niceness": "0"},
        )  # fmt: skip
    try:
        rig.begin(gpus=3, hold_s=0.5)  # more than the other node has
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
    rig.until(lambda: not rig.left(), "it has ended")

    assert "saved" in rig.marks()
    rig.until(lambda: not rig.holder("executor"), "its executor, too")
    rig.cluster.remove()
    until(lambda: not is_reserved(), "it is not waited for any more")


def test_the_command_leaves_all_on_sigterm_and_ends_all_on_ctrl_c(rig, cluster_address):
    rig.script("forever()")
    command = [
        *(sys.executable, "-m", "holdfast.cli.main", "execute", "--ray", cluster_address),
        *("--gpus", "2", "--nodes", "1", "--folder", str(rig.execute)),
        *("--scheduler", f"http://127.0.0.1:{rig.server.server_port}"),
    ]
    environ = {**os.environ, "PYTHONPATH": HERE, "HOLDFAST_AGENT": str(rig.agent.socket)}
    log = rig.folder / "command.log"

    def begun():
        with log.open("wb") as output:
            return subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def told():
        return log.read_text()

    process = begun()
    try:
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        until(lambda: "executor" in told(), told)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LATE_S) == 128 + signal.SIGTERM, told()
        assert rig.left(), "it trains on"

        process = begun()
        until(lambda: "executor" in told(), told)
        process.send_signal(signal.SIGINT)
        assert process.wait(LATE_S) == 128 + signal.SIGINT, told()
    finally:
        process.kill()
        process.wait()
    assert not rig.left()
    assert not rig.holder("executor")
    until(lambda: not is_reserved(), "Ray has its node back")
