"""``docker-compose.yml`` as a user runs it: built, up, trained on, each container killed in turn.

The engine is ours, and so are the images that a registry would give (``tests/compose``): Debian's
Postgres and Redis in the place of the official ones. The store is the session's Ceph gateway.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.e2e.stack import ROOT, TRAINER, running_stack, until
from tests.e2e.test_bit_identity import finals
from tests.servers.docker import PYTHON, Engine, run, running_docker
from tests.servers.processes import free_port
from tests.servers.s3 import S3Server

FILES = (ROOT / "docker-compose.yml", ROOT / "tests/compose/override.yml")
SERVICES = ("postgres", "redis", "metadata", "agent-1", "agent-2", "worker")
TRAINERS = ("trainer-1", "trainer-2")
HEALTHY_S_MAX = 120.0
STEP_S_MAX = 240.0
SCRAPED_S_MAX = 60.0
STEPS = 60
MORE_STEPS = 70


class Compose:
    """The stack under one project's name; ``environment`` is what ``.env`` would say."""

    def __init__(self, engine: Engine, store: S3Server, said_here: Path) -> None:
        self.engine, self.said_here = engine, said_here
        self.rest_port, self.prometheus_port = free_port(), free_port()
        at_gateway = re.sub(r"//[^:/]+", f"//{engine.gateway}", store.endpoint)
        self._environment = {
            **engine.environment,
            **store.environment,
            "PYTHON_IMAGE": PYTHON,
            "HOLDFAST_IMAGE": "holdfast-test/holdfast",
            "HOLDFAST_STORE": store.at(store.bucket(), endpoint=at_gateway),
            "HOLDFAST_REST_PORT": str(self.rest_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "HOLDFAST_ARENA_SIZE": "512m",
            "HOLDFAST_BUDGET": "448MiB",
            "TEST_PACKAGES": sysconfig.get_path("purelib"),
            "TEST_TRAINER": str(TRAINER),
            "TEST_SAID": str(said_here),
        }

    def __call__(self, *arguments: str, steps: int = STEPS) -> str:
        """Run ``docker-compose`` with ``arguments``; the script trains for ``steps``."""
        script = f"/trainer.py --job gpt --persist 10 --pause-s 0.1 --steps {steps}"
        script += " --until-told /said/go"
        files = [word for file in FILES for word in ("-f", str(file))]
        profiles = ("--profile", "train", "--profile", "monitoring")
        return run(
            "docker-compose", "-p", "holdfast-test", *files, *profiles, *arguments,
            env={**self._environment, "HOLDFAST_SCRIPT": script}, cwd=ROOT,
        )  # fmt: skip

    def up(self, *services: str, steps: int = STEPS) -> None:
        """Start services."""
        self("up", "-d", "--no-build", *services, steps=steps)

    def until_healthy(self, *services: str) -> None:
        """Wait until health checks say that ``services`` work."""
        for name in services:
            until(
                lambda name=name: self._inspect(name, "{{.State.Health.Status}}") == "healthy",
                f"{name} is healthy", HEALTHY_S_MAX,
            )  # fmt: skip

    def kill(self, service: str) -> None:
        """Kill all that runs in a container, as the kernel does when memory is short."""
        before = self._inspect(service, "{{.RestartCount}}")
        os.kill(int(self._inspect(service, "{{.State.Pid}}")), signal.SIGKILL)
        until(lambda: self._inspect(service, "{{.RestartCount}}") != before, f"{service} is back")

    def _inspect(self, service: str, what: str) -> str:
        return self.engine.docker("inspect", "-f", what, f"holdfast-test_{service}_1").strip()

    def said(self, trainer: str, pattern: str) -> list[str]:
        """Return what the ranks of a node have printed, in all rounds."""
        text = self.engine.docker("logs", f"holdfast-test_{trainer}_1")
        return re.findall(pattern, text, re.MULTILINE)

    def prometheus(self, path: str) -> Any:
        """Return the data that Prometheus answers."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def last_step(self) -> int:
        """Return the step that node 1 has done last, 0: none."""
        return int(self.said("trainer-1", r"^step (\d+) ")[-1:][0] if self.has_stepped() else 0)

    def has_stepped(self) -> bool:
        return bool(self.said("trainer-1", r"^step \d+ "))

    def until_step(self, step: int) -> None:
        """Wait until node 1 has done ``step``."""
        until(lambda: self.last_step() >= step, f"step {step}", STEP_S_MAX)

    def finals(self) -> list[str]:
        """Return the fingerprints of both ranks, once they are there."""
        done = r"^final (\w+)$"
        until(lambda: all(self.said(name, done) for name in TRAINERS), "the end", STEP_S_MAX)
        return [self.said(name, done)[-1] for name in TRAINERS]

    def is_durable(self, step: int) -> bool:
        """Tell whether a step of the training is in the store."""
        url = f"http://127.0.0.1:{self.rest_port}/api/v1/jobs/gpt/checkpoints?durable=true"
        with urllib.request.urlopen(url, timeout=10) as answer:
            rows = json.load(answer)
        return any(row["step"] == step and row["level"] == "durable" for row in rows)


@pytest.fixture
def compose(ceph_server: S3Server, tmp_path: Path) -> Iterator[Compose]:
    """The stack, with the image built, and nothing up yet."""
    tmp_path.chmod(0o755)  # the trainers are another user
    with running_docker() as engine:
        engine.ensure_python()
        made = ROOT / "tests/compose"
        engine.docker(
            "build", "-q", "--build-arg", f"PYTHON={PYTHON}", "-t", "holdfast-test/servers", made
        )
        stack = Compose(engine, ceph_server, tmp_path)
        stack("build", "metadata")
        try:
            yield stack
        finally:
            stack("down", "--volumes", "--timeout", "5")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_stack_trains_and_loses_each_container_and_no_bit(compose: Compose) -> None:
    """P1, P2, P4, F115: what compose starts is the product."""
    compose.up(*SERVICES, "prometheus")
    compose.until_healthy(*SERVICES)
    compose.up(*TRAINERS)
    compose.until_step(3)

    for service in ("metadata", "postgres", "redis", "worker", "agent-1"):
        compose.kill(service)
        compose.until_step(min(compose.last_step() + 2, STEPS - 1))
    compose.until_healthy(*SERVICES)
    beginnings = compose.said("trainer-1", r"^restored (\d+)")
    why = "\n".join(compose.said("trainer-1", r"^(?!step )(.*)$")[-60:])
    assert beginnings == ["0"], f"no kill of a service stops it:\n{why}"
    compose.kill("trainer-2")
    until(lambda: len(compose.said("trainer-1", r"^restored")) == 2, "both go on", STEP_S_MAX)
    compose.until_step(min(compose.last_step() + 2, STEPS - 1))
    compose("kill", "agent-2", "trainer-2")  # and the memory of the node with them
    compose.up("agent-2", "trainer-2")
    until(lambda: len(compose.said("trainer-1", r"^restored")) == 3, "both go on", STEP_S_MAX)
    (compose.said_here / "go").touch()
    ends = compose.finals()

    assert compose.said("agent-2", r"(\d+) slots adopted")[-1] == "0", "nothing was left there"
    with running_stack(nodes=2) as calm:
        assert sorted(ends) == sorted(finals(calm, steps=str(STEPS), world_size=2))

    until(lambda: compose.is_durable(STEPS), f"step {STEPS} is in the store", STEP_S_MAX)
    _check_monitoring(compose)
    compose("down", "--timeout", "5")  # Postgres keeps its volume; the memory of the nodes is gone
    compose.up(*SERVICES, *TRAINERS, steps=MORE_STEPS)
    compose.finals()

    assert [compose.said(name, r"^restored (\d+) .*'object'") for name in TRAINERS] == [
        [str(STEPS)], [str(STEPS)],
    ]  # fmt: skip


def _check_monitoring(compose: Compose) -> None:
    """F110, F114: Prometheus has taken the alerts, and what the dashboard asks for is there."""
    groups = compose.prometheus("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    board = json.loads((ROOT / "deploy/grafana/dashboards/holdfast.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in (*asked, *(rule["query"] for rule in rules)):
        query = f"query?query={quote(_names(expression))}"
        until(
            lambda query=query: compose.prometheus(query)["result"],
            f"Prometheus knows what {expression} asks for", SCRAPED_S_MAX,
        )  # fmt: skip

    assert {rule["health"] for rule in rules} == {"ok"}


def _names(expression: str) -> str:
    """Return a query that is empty unless each metric of ``expression`` was there lately."""
    names = sorted(set(re.findall(r"holdfast_\w+|up\{.*?\}", expression)))
    return " and on() ".join(f"last_over_time({name}[10m])" for name in names)
