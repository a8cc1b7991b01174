"""A node agent dies at every operation of a save, the owner's and its backup's: all converges."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path

import pytest
from tests.crash.arenas import leftovers, torn, used_bytes
from tests.crash.operations import Point, common
from tests.e2e.stack import ROOT, environment
from tests.integration.agent.harness import Node, Trainer, reserve, until
from tests.integration.metadata.test_process import start as start_metadata

from holdfast.core.decision import DecisionState
from holdfast.errors import CheckpointError
from holdfast.v1 import agent_pb2 as pb

pytestmark = pytest.mark.timeout(300)
MIB = 1 << 20
PAGE = 4096
BUDGET_BYTES = 16 * MIB
CLEAN_RUNS = 2
TRIES = 3
REACHED_SHARE_MIN = 0.8
DEATH_S = {True: 5.0, False: 1.5}  # a whole attempt is waited for anyway, a save is not


class Agent(Node):
    """A node whose agent the nursery forks; ``process`` is what ``subprocess`` would give."""

    def __init__(self, name, folder, metadata, nursery) -> None:
        environ = {"HOLDFAST_BUDGET": str(BUDGET_BYTES), "GRPC_ENABLE_FORK_SUPPORT": "0"}
        super().__init__(name, folder, metadata, environ)
        self._nursery = nursery
        self.point: Point | None = None

    def ask(self, **command):
        self._nursery.stdin.write(json.dumps(command) + "\n")
        self._nursery.stdin.flush()
        return json.loads(self._nursery.stdout.readline())

    def spawn(self):
        self.folder.mkdir(exist_ok=True)
        for name in (self._ready, self.folder / "armed", self.folder / "counted"):
            name.unlink(missing_ok=True)
        point = astuple(self.point) if self.point else None
        self.pid = self.ask(folder=str(self.folder), environ=self._environ, point=point)
        self.process = self
        self.status = None
        return self

    def poll(self):
        self.status = self.ask(pid=self.pid) if self.status is None else self.status
        return self.status

    def kill(self) -> None:
        if self.process and self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            until(lambda: self.poll() is not None, "killed")

    def arm(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)
        until((self.folder / "armed").exists, "armed")

    def counted(self) -> list[Point]:
        os.kill(self.pid, signal.SIGUSR2)
        until((self.folder / "counted").exists, "counted")
        return [Point(*one) for one in json.loads((self.folder / "counted").read_text())]


class Writer:
    """A rank without torch: keeps its session, nonce and reservation as the SDK does."""

    step = 0

    def __init__(self, owner: Agent, length_bytes: int) -> None:
        self.owner = owner
        self.length_bytes = length_bytes
        self.nonce = secrets.token_bytes(16)
        self.trainer = Trainer(owner.arena, secrets.token_hex(16))
        self.session = self.trainer.session

    def open(self) -> None:
        """Open or open again, and reserve or reserve again: the same calls (4.0)."""
        answer = self.owner.call(
            "OpenSession",
            pb.OpenSessionRequest(
                session=self.session,
                spec={
                    "job": "job", "nonce": self.nonce, "launcher": "l", "holder": "h",
                    "rank": 0, "world_size": 1, "local_world_size": 1, "replicas": 1,
                },
            ),
        )  # fmt: skip
        self.run, self.generation = answer.seat.run, answer.seat.generation
        reserve(self.owner, self.session, self.length_bytes)

    def view(self):
        return self.owner.view(self.session)

    def begin(self) -> None:
        """Wait for the decision and say that it has been loaded."""

        def confirmed():
            restore = self.view().restore
            return restore and restore.decision.state is DecisionState.CONFIRMED

        until(confirmed, "the restore is confirmed")
        self.owner.call("Update", pb.UpdateRequest(session=self.session, report={"loaded": True}))

    def lease(self):
        def unused():
            names = [(lease.slot, lease.incarnation) for lease in self.view().leases]
            return [n for n in names if (self.owner.arena / f"{n[0]}.{n[1]}.open").exists()]

        return until(unused, "a lease")[0]

    def write(self, lease) -> None:
        """Fill and close a slot, then tell the agent, if it lives."""
        Writer.step += 1
        words = (*lease, Writer.step, self.generation, self.length_bytes, 0, self.run)
        assert self.trainer.ask("write", *words) == "closed"
        with contextlib.suppress(CheckpointError):
            update = pb.UpdateRequest(session=self.session, closed_slots=[lease[0]])
            self.owner.call("Update", update)

    def until_replicated(self) -> None:
        step = Writer.step
        until(
            lambda: any(s.step == step and s.replicated for s in self.view().steps),
            f"step {step} is replicated",
        )


class Cluster:
    """Two nodes under a real catalogue, and one writer on the first."""

    def __init__(self, folder: Path, metadata: str, nursery) -> None:
        self.a, self.b = (Agent(name, folder / name, metadata, nursery) for name in "ab")
        self.a.start()
        self.b.start()
        self.writer = self.attempt()
        self.writer.open()
        self.settle()

    def attempt(self) -> Writer:
        """Start the next attempt's process; its slots have a length that no other had."""
        length_bytes = MIB
        if hasattr(self, "writer"):
            self.writer.trainer.end()
            length_bytes = self.writer.length_bytes + PAGE
        return Writer(self.a, length_bytes)

    def settle(self) -> None:
        """A save of this session goes all the way, and leaves nothing behind."""
        self.writer.begin()
        self.writer.write(self.writer.lease())
        self.check()

    def check(self) -> None:
        """The newest save is replicated, all sealed slots are whole, no slot is lost."""
        self.writer.until_replicated()
        self.writer.lease()
        for node in (self.a, self.b):
            until(lambda n=node: not n.files("closed"), "closed slots are dealt with")
            assert [] == torn(node.arena)
            assert [] == leftovers(node.arena)
            until(
                lambda n=node: n.dump()["used_bytes"] == used_bytes(n.arena) <= BUDGET_BYTES,
                "every slot is accounted for",
            )
        assert len(self.a.files("open")) <= 2

    def saves(self, victim: Agent) -> None:
        """One save during which ``victim`` may die; what was asked for before is done by then."""
        lease = self.writer.lease()
        until(self.asked, "the owner has asked for copies of what it holds")
        victim.arm()
        self.writer.write(lease)

    def asked(self) -> bool:
        """Tell whether each copy of what the owner holds has been asked for, with success."""
        asks = self.a.dump()["asks"].values()
        return bool(asks) and all(ask["done"] for ask in asks)

    def opens(self, victim: Agent) -> None:
        """One attempt: its session, its slots, its restore; ``victim`` may die."""
        self.writer = self.attempt()
        victim.arm()
        with contextlib.suppress(CheckpointError):
            self.writer.open()
            self.writer.begin()
            self.writer.lease()

    def learn(self, work, victim: Agent) -> list[Point]:
        """Return the points of ``work`` that two runs without a death have both reached."""
        logs = []
        for _ in range(CLEAN_RUNS):
            victim.point = None
            victim.kill()
            self.revive(victim)
            work(victim)
            if work == self.saves:
                self.check()
            logs.append(victim.counted())
            if work == self.opens:
                self.settle()
        return [p for p in common(logs) if not (p.label == "open session" and p.nth)]

    def revive(self, victim: Agent) -> None:
        """Start a dead agent; a session it has forgotten is opened again."""
        victim.start()
        if victim is self.a:
            self.writer.open()

    def sweep(self, work, victim: Agent) -> list[str]:
        """Die at every point of ``work``; all must converge each time. Returns those reached.

        How often an agent watches, and whether it frees a slot before or after it is told to make
        others, is a matter of moments: a few points of both clean runs may never come again.
        """
        points = self.learn(work, victim)
        reached = [
            str(point)
            for point in points
            if any(self.die(work, victim, point) for _ in range(TRIES))
        ]
        assert len(reached) >= REACHED_SHARE_MIN * len(points), (points, reached)
        return reached

    def die(self, work, victim: Agent, point: Point) -> bool:
        """Tell whether ``victim`` died at ``point``; either way it is well afterwards."""
        victim.point = point
        victim.kill()
        self.revive(victim)
        work(victim)
        with contextlib.suppress(AssertionError):
            until(lambda: victim.poll() is not None, f"death {point}", DEATH_S[work == self.saves])
        died = victim.poll() == -signal.SIGKILL
        victim.point = None
        victim.kill()
        self.revive(victim)
        if work == self.opens:
            self.settle()
        else:
            self.check()
        return died


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    home = tmp_path_factory.mktemp("metadata")
    metadata = start_metadata(home)
    paths = f"{ROOT / 'sdk'}:{ROOT / 'services'}:{ROOT}"
    nursery = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.nursery"],
        env=environment(PYTHONPATH=paths, GRPC_ENABLE_FORK_SUPPORT="0"), cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="hf", dir="/dev/shm"))
    address = json.loads((home / "ready.json").read_text())["address"]
    made = Cluster(folder, address, nursery)
    yield made
    made.writer.trainer.end()
    for node in (made.a, made.b):
        node.kill()
    nursery.stdin.close()
    nursery.wait(10)
    nursery.stdout.close()
    metadata.stop()
    shutil.rmtree(folder)


def test_the_owner_dies_while_it_seals_reports_replicates_and_leases(cluster):
    """P1, P3, P5, G8: what the trainer closed becomes `replicated`, and the next save works."""
    points = cluster.sweep(cluster.saves, cluster.a)

    assert {"rename", "lock", "unlock", "open", "call"} <= {p.split()[1] for p in points}
    assert {"call Report", "call Hold"} <= {p.split(" ", 1)[1].split(" #")[0] for p in points}


def test_the_backup_dies_while_it_fetches_and_seals(cluster):
    """P3, P5: the copy is made again, whole, and no slot of the dead fetch is lost."""
    points = cluster.sweep(cluster.saves, cluster.b)

    assert {"fetch", "rename", "open"} <= {p.split()[1] for p in points}


def test_the_agent_dies_while_it_opens_a_session_and_makes_slots(cluster):
    """P5, P8: the same calls again find the same attempt; memory stays within the budget."""
    points = cluster.sweep(cluster.opens, cluster.a)

    assert {"posix_fallocate", "rename", "call"} <= {p.split()[1] for p in points}
