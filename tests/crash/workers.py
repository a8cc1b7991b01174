"""Forks persistence workers that can be told to die; for ``test_worker_sweep``.

Imports the worker once and never makes a thread or a gRPC object, so that it may fork: a worker
starts in a few hundredths of a second. Reads one JSON command a line and answers each.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tests.crash.operations import Point, Sweep

from holdfast.objectstore.directory import DirectoryStore
from holdfast_services.kit.queue.sqlite import SqliteQueue
from holdfast_services.persistence import clients
from holdfast_services.persistence import main as worker

STORE = (
    "head", "get", "put", "read_into", "open_uploads", "begin", "resume", "parts", "put_part",
    "copy_part", "finish", "abort", "delete",
)  # fmt: skip


def subject(argument: Any) -> str:
    """Return the file name that a call of the store is about, the same in every run."""
    key = argument if isinstance(argument, str) else getattr(argument, "key", "")
    name = str(key).rpartition("/")[2]
    return "index" if name.startswith("index-") else name


def watch(sweep: Sweep) -> None:
    """Make every call of store and catalogue an operation, and every settled claim."""
    for name in STORE:
        inner = getattr(DirectoryStore, name)

        def called(self: Any, *args: Any, _inner: Any = inner, _name: str = name, **more: Any):
            begun = sweep.begin(f"{_name} {subject(args[0])}")
            try:
                return _inner(self, *args, **more)
            finally:
                sweep.end(begun)

        setattr(DirectoryStore, name, functools.wraps(inner)(called))
    sweep.wrap(clients, "call")
    sweep.wrap(SqliteQueue, "acknowledge", "acknowledge")


def live(environ: dict[str, str], folder: Path, point: Point | None) -> None:
    """Be a worker until killed or told to stop; write down what was counted."""
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(environ)
    sweep = Sweep(point)
    watch(sweep)
    sweep.arm()
    code = worker.main()
    (folder / "counted").write_text(json.dumps([astuple(reached) for reached in sweep.log]))
    os._exit(code)


def begin(asked: dict[str, Any]) -> int:
    """Fork a worker; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            point = Point(*asked["point"]) if asked["point"] else None
            live(asked["environ"], Path(asked["folder"]), point)
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    return pid


def ended(pid: int, number: int) -> int | None:
    """Send ``number`` (0: nothing); return how the child ended, None while it lives."""
    if number:
        os.kill(pid, number)
    done, status = os.waitpid(pid, 0 if number == signal.SIGKILL else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    for line in sys.stdin:
        command = json.loads(line)
        answer = begin(command) if "folder" in command else ended(**command)
        print(json.dumps(answer), flush=True)
