"""Forks node agents that can be told to die; for ``test_agent_sweep``.

The nursery imports the agent once and never makes a thread or a gRPC object, so that it may
fork: an agent starts in a tenth of a second. It reads one JSON command a line and answers each.
An agent counts operations from SIGUSR1 on and writes down what it has counted on SIGUSR2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tests.crash.operations import Point, Sweep

from holdfast_services.agent import main as agent
from holdfast_services.kit import runner
from holdfast_services.transport.tcp import TcpTransport


def live(folder: Path, environ: dict[str, str], point: Point | None) -> None:
    """Be an agent until killed or told to stop."""
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(environ)
    sweep = Sweep(point)

    def arm(*_: object) -> None:
        (folder / "armed").write_text("")
        sweep.arm()

    def disarm(*_: object) -> None:
        sweep.armed = False
        draft = folder / "counted.draft"
        draft.write_text(json.dumps([astuple(reached) for reached in sweep.log]))
        draft.rename(folder / "counted")

    sweep.install()
    sweep.wrap(TcpTransport, "fetch", "fetch")
    signal.signal(signal.SIGUSR1, arm)
    signal.signal(signal.SIGUSR2, disarm)
    os._exit(runner.run("agent", agent.serve))


def begin(command: dict[str, Any]) -> int:
    """Fork an agent; return its pid."""
    point = command["point"]
    pid = os.fork()
    if pid == 0:
        try:
            live(Path(command["folder"]), command["environ"], Point(*point) if point else None)
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    return pid


def ended(pid: int) -> int | None:
    """Return how a child ended, as ``subprocess`` says it; None while it lives."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        answer = begin(asked) if "folder" in asked else ended(asked["pid"])
        print(json.dumps(answer), flush=True)
