"""Launchers as processes, over agents that are threads of the test and decide as metadata does."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
from tests.servers.nursery import QUICK

from holdfast import locks
from holdfast.core.retry import bounded
from holdfast.core.rounds import LaunchRequest, check
from holdfast.errors import CheckpointError, PreconditionError
from holdfast.rpc import codec
from holdfast.rpc.channel import server_options, unix_target
from holdfast.rpc.status import TRAILER, to_status
from holdfast.v1 import agent_pb2, agent_pb2_grpc, metadata_pb2
from holdfast_services.metadata.domain import round_view, rounds
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.rounds import Gone, Reported

ROOT = Path(__file__).parents[3]
PACKAGES = sysconfig.get_path("purelib")
LEASE_S = 40.0
WAIT_S_MAX = 200.0


class Decision:
    """One launch, decided by the rules that metadata runs."""

    def __init__(self, job="job"):
        self.launch = Launch(job=job)
        self.lease_s = LEASE_S
        self.reports = []
        self.events = []
        self.news = threading.Condition()

    def feed(self, event):
        with self.news:
            self.launch, events = rounds.handle(
                self.launch, event, now_s=time.time(), lease_s=self.lease_s
            )
            self.events += events
            self.news.notify_all()

    def until(self, met, what):
        """Wait until ``met`` of the launch, which each report may change."""
        with self.news:
            assert self.news.wait_for(lambda: met(self.launch), WAIT_S_MAX), (what, self.launch)
            return self.launch

    def until_round(self, number):
        """Wait until all members run the ranks of a round, which is on."""

        def runs(launch):
            last = {report.launcher: report for report in self.reports}
            return (
                launch.on
                and launch.number == number
                and all(last[member.launcher].round == launch.nonce for member in launch.members)
            )

        return self.until(runs, f"round {number}")


class Agent(agent_pb2_grpc.AgentServicer):
    """What a launcher asks of its agent; sees launchers end as the real one does."""

    def __init__(self, decision, node, folder):
        self.decision, self.node = decision, node
        self.others = {}
        self.arena = folder / f"arena-{node}"
        (self.arena / "sessions").mkdir(parents=True)
        self.socket = folder / f"{node}.sock"
        self.watched = set()
        self.blind = False
        self.asked = 0
        self.server = None
        self.start()

    def start(self):
        self.server = grpc.server(ThreadPoolExecutor(8), options=server_options())
        agent_pb2_grpc.add_AgentServicer_to_server(self, self.server)
        self.server.add_insecure_port(unix_target(self.socket))
        self.server.start()

    def stop(self):
        self.server.stop(None).wait()

    def Describe(self, request, context):
        return agent_pb2.DescribeResponse(node=self.node, arena=str(self.arena))

    def Launch(self, message, context):
        request = codec.from_message(message, LaunchRequest)
        name = request.report.launcher
        job = request.report.job
        decision = self.decision
        if job != "job":
            decision = self.others.setdefault(job, Decision(job))
        self.watch(name, decision)
        self.asked += 1
        try:
            if self.blind:
                raise PreconditionError("no lock is seen")
            check(request.report)
            with decision.news:
                decision.reports.append(request.report)
                decision.news.notify_all()
            decision.feed(Reported(request.report, self.node, "127.0.0.1"))
        except CheckpointError as error:
            code, detail = to_status(error)
            context.set_trailing_metadata(((TRAILER, detail.SerializeToString()),))
            context.abort(code, detail.message)
        ends_s = time.monotonic() + bounded(request.wait_s, 5.0)
        with decision.news:
            while True:
                view = round_view.view(decision.launch, name, lease_s=decision.lease_s)
                version = hashlib.blake2b(repr(view).encode()).hexdigest()[:16]
                left_s = ends_s - time.monotonic()
                if version != request.version or left_s <= 0 or not context.is_active():
                    break
                decision.news.wait(min(left_s, 0.5))
        return codec.to_message(replace(view, version=version), metadata_pb2.LaunchView)

    def watch(self, launcher, decision):
        if launcher in self.watched:
            return
        pid = locks.holder_of(self.arena / "sessions" / launcher)
        if not pid:
            return
        self.watched.add(launcher)
        pidfd = os.pidfd_open(pid)

        def gone():
            select.select([pidfd], [], [])
            decision.feed(Gone(frozenset({launcher})))

        threading.Thread(target=gone, daemon=True).start()


class Cluster:
    """Nodes with launchers, and what these have printed."""

    def __init__(self, folder):
        self.folder = folder
        self.decision = Decision()
        self.agents = {}
        self.launchers = []

    def script(self, text):
        """Write the script of all ranks; it leaves a file for each rank and round."""
        (self.folder / "train.py").write_text(PRELUDE + text)

    def launcher(self, node, *options, arguments=(), through=(), program=sys.executable, **streams):
        """Start a launcher on a node; ``through`` a program that becomes it."""
        if node not in self.agents:
            self.agents[node] = Agent(self.decision, node, self.folder)
        log = self.folder / f"{node}-{len(self.launchers)}.log"
        command = [program, "-m", "holdfast.cli.main", "run", "--job", "job", *options]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*through, *command, "train.py", *arguments], cwd=self.folder,
                **{"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL, **streams},
                env={
                    **os.environ, "HOLDFAST_AGENT": str(self.agents[node].socket), "NODE": node,
                    "FOLDER": str(self.folder),
                    "PYTHONPATH": f"{QUICK}:{ROOT / 'sdk'}:{self.folder}:{PACKAGES}",
                },
            )  # fmt: skip
        self.launchers.append(process)
        return process

    def pid(self, number, rank):
        """Return the pid of a rank of a round, once it runs."""
        path = self.folder / f"round-{number}-rank-{rank}"
        until(path.exists, f"{path.name}\n{self.said()}")
        return int(path.read_text())

    def codes(self):
        """Return the exit codes of all launchers."""
        return [process.wait(WAIT_S_MAX) for process in self.launchers]

    def said(self):
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log"))
        )

    def left(self):
        """Return the processes that this cluster has left behind."""
        word = f"FOLDER={self.folder}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and word in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes())
        return found

    def close(self):
        for process in self.launchers:
            process.kill()
            process.wait()
        for agent in self.agents.values():
            agent.stop()


PRELUDE = """
import os, pathlib, signal, sys, time
ROUND, RANK = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1, int(os.environ["RANK"])
ME = pathlib.Path(os.environ["FOLDER"], f"round-{ROUND}-rank-{RANK}")
ME.with_suffix(".new").write_text(str(os.getpid()))
ME.with_suffix(".new").rename(ME)
def forever():
    while True:
        signal.pause()
"""


BACKGROUND = """
import subprocess
stay = "import os, time; print('behind', os.getpid(), flush=True); time.sleep(1000)"
def leave_behind():
    subprocess.Popen(["setsid", "--fork", sys.executable, "-c", stay])
"""
"""What a rank sends to the background has a session of its own, and holds the rank's output."""


def until(met, what):
    """Wait for an event that nothing tells of."""
    ends_s = time.monotonic() + WAIT_S_MAX
    while not met():
        assert time.monotonic() < ends_s, what
        time.sleep(0.05)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
