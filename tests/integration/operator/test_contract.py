"""The operator as an actuator: it passes the suite that executors pass, with pods for launchers.

Its launchers are real, its API server is kmock, or a real one in ``make test-kubernetes``; the
scheduler only says orders (ADR 0069).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.contract.actuators import ActuatorSuite
from tests.contract.executor_rig import Rig, standing
from tests.integration.launcher.harness import PACKAGES, ROOT, kill
from tests.integration.operator.cluster import NOWHERE, Kubelet, api_server
from tests.unit.operator.objects import example

from holdfast.core.executions import Order, Orders, Outcome


class KubernetesRig(Rig):
    """One node of Kubernetes with the operator, and who orders."""

    job = "default.job"

    def __init__(self, folder):
        super().__init__(folder)
        self.agent.others[self.job] = self.decision
        self.api = api_server()
        self.api.add_node("n")
        self.api.add_job("job")
        environ = {"FOLDER": str(folder), "PYTHONPATH": f"{ROOT / 'sdk'}:{PACKAGES}"}
        self.kubelet = Kubelet(self.api, folder, {"n": self.agent.socket}, environ)

    def begin(self):
        """Start an operator."""
        self.reports_since_begin = 0
        with (self.folder / "executor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast_services.operator"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.api.environment,
                     "HOLDFAST_SCHEDULER": f"http://127.0.0.1:{self.server.server_port}",
                     "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}:{PACKAGES}"},
            )  # fmt: skip

    def said(self):
        logs = (self.folder / "executor.log", *self.folder.glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in logs if path.exists())

    def kill_launch(self, start):
        (process,) = (p for name, p in self.kubelet.processes.items() if f"-{start}-" in name)
        kill(process.pid)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60) == 0, self.said()
        self.kubelet.close()
        self.agent.stop()
        self.server.shutdown()
        self.server.server_close()
        self.api.close()


@pytest.fixture
def rig():
    with standing(KubernetesRig) as made:
        yield made


class TestOperator(ActuatorSuite):
    """The suite."""


def test_what_can_never_begin_is_refused_with_the_reason_and_leaves_nothing(rig):
    """A template that Kubernetes refuses would else be a job that starts for ever (F105)."""
    nowhere = example()["spec"]["template"]
    nowhere["spec"]["containers"][0]["image"] = NOWHERE
    rig.api.add_job("nowhere", template=nowhere)
    rig.api.add_job("empty", template={"spec": {}})
    reasons = {
        "default.nowhere": "container ranks: ImagePullBackOff: no such image",
        "default.empty": "containers is empty: name an image",
        "default.unknown": "no pod can be made",
        "elsewhere": "is of no HoldfastJob",
    }
    rig.begin()
    orders = (
        Order(job=job, start=3, gpus=1, nodes_max=1, command=("train.py",), folder=str(rig.folder))
        for job in reasons
    )
    with rig.news:
        rig.orders = Orders(version="3", number=3, orders=tuple(orders), poll_s=1.0)
        rig.news.notify_all()

    def refused():
        return {one.job: one for one in rig.report.launches if one.outcome is Outcome.REFUSED}

    rig.until(lambda: refused().keys() == reasons.keys(), "all are refused")
    for job, reason in reasons.items():
        assert reason in refused()[job].reason, refused()[job]
    assert rig.report.applied == 3
    rig.order(4)
    rig.until(lambda: not rig.report.launches and not rig.api.pods(), "nobody asks any more")
    assert not rig.kubelet.processes
