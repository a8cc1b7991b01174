"""An executor with all that it talks to: an agent, and a scheduler that only says orders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.integration.launcher.harness import PACKAGES, ROOT, Agent, Decision, kill, until
from tests.servers.nursery import QUICK

from holdfast.core.allocations import Allocation, Share
from holdfast.core.executions import ExecutorReport, ExecutorRequest, Order, Orders
from holdfast.core.records import from_record, to_record
from holdfast_services.metadata.domain.rounds import Allocated

PRELUDE = """
import os, pathlib, signal, sys, time
FOLDER = pathlib.Path(os.environ["FOLDER"])
def mark(name):
    (FOLDER / f"mark-{name}").touch()
def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.05)
def forever():
    while True:
        signal.pause()
mark(os.getpid())
"""


class Rig:
    """One node with its executor, and who orders."""

    job = "job"

    def __init__(self, folder):
        self.folder = folder
        self.decision = Decision(self.job)
        self.agent = Agent(self.decision, "n", folder)
        self.orders = Orders(version="0", poll_s=1.0)
        self.report = ExecutorReport(executor="0" * 32, sequence=0, gpus=0)
        self.reports_since_begin = 0
        self.news = threading.Condition()
        self.process = None
        self.environment = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(rig):  # noqa: N805 - of the handler's class
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request = from_record(ExecutorRequest, body)
                with rig.news:
                    known, said = rig.report, request.report
                    if said.executor != known.executor or said.sequence > known.sequence:
                        rig.report = said
                    rig.reports_since_begin += 1
                    rig.news.notify_all()
                    rig.news.wait_for(lambda: rig.orders.version != request.version, 1.0)
                    answer = json.dumps(to_record(rig.orders)).encode()
                self._answer(answer)

            def do_DELETE(self):
                self._answer(b"{}")

            def _answer(self, body):
                with contextlib.suppress(OSError):  # it had news, and asks anew
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler

    def script(self, text):
        (self.folder / "train.py").write_text(PRELUDE + text)

    def begin(self):
        """Start an executor."""
        self.reports_since_begin = 0
        with (self.folder / "executor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli.main", "execute", "--gpus", "2",
                 "--folder", str(self.folder / "execute"),
                 "--scheduler", f"http://127.0.0.1:{self.server.server_port}"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, "HOLDFAST_AGENT": str(self.agent.socket),
                     "FOLDER": str(self.folder),
                     "PYTHONPATH": f"{QUICK}:{ROOT / 'sdk'}:{PACKAGES}"},
            )  # fmt: skip

    def kill(self):
        self.process.kill()
        self.process.wait()

    def order(self, number, *, start=0, **what):
        """Have the launcher of a start run, of one rank, or with no start nothing."""
        orders = ()
        if start:
            order = Order(
                job=self.job, start=start, gpus=1, nodes_max=1,
                command=("--no-standby", "train.py"), environment=self.environment,
                **{"folder": str(self.folder), "grace_s": 5.0, **what},
            )  # fmt: skip
            orders = (order,)
            if not order.leaving:
                share = Share(node="n", ranks=1, devices=(0,))
                self.decision.feed(Allocated(Allocation(number=number, shares=(share,))))
        with self.news:
            self.orders = Orders(version=str(number), number=number, orders=orders, poll_s=1.0)
            self.news.notify_all()

    def until(self, met, what):
        ends_s = time.monotonic() + 100.0
        while not met():
            assert time.monotonic() < ends_s, (what, self.report, self.said())
            self.check()
            time.sleep(0.05)

    def check(self):
        """Fail at once if it has ended by itself."""
        assert self.process.poll() in (None, -signal.SIGKILL), self.said()

    def said(self):
        logs = [self.folder / "executor.log", *(self.folder / "execute" / "logs").glob("*")]
        return "\n".join(path.read_text(errors="replace") for path in logs if path.exists())

    def marks(self):
        return [path.name.removeprefix("mark-") for path in self.folder.glob("mark-*")]

    def leave(self, name):
        (self.folder / name).touch()

    def kill_launch(self, start):
        word = f"job.{start}/ending.json".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if word in path.read_bytes() and str(self.folder).encode() in path.read_bytes():
                    kill(int(path.parent.name))

    def left(self):
        """Return the processes of launches that live."""
        word = f"FOLDER={self.folder}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                ours = word in (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes()
                if alive and ours and b"\0execute\0" not in words:
                    found.append(words)
        return found

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # with its launchers
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
            self.process.wait()
        self.agent.stop()
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def standing(kind):
    """A rig of a kind in a folder of its own; nothing of it may be left in the end."""
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    made = kind(folder)
    try:
        yield made
        made.close()
        until(lambda: not made.left(), ("no process is left", made.left(), made.said()))
    finally:
        if made.process is not None:
            made.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
