"""Ends what a launcher has started, if the launcher is killed: no process outlives it.

Run by its file name. It reads ``+GROUP MARK`` and ``-GROUP`` from its input, and ends what is left
when that ends. Ranks die by themselves then; this is for what they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

MARK = "HOLDFAST_RANK_PROCESS"
"""A variable that a rank and all that it starts have in their environment: by it they are found in
sessions of their own, too. Of a rank that a launcher in a rank has started it has both marks."""


def main() -> None:
    """Read until the launcher has gone, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, str] = {}
    for line in sys.stdin:
        group, _, mark = line[1:].strip().partition(" ")
        if line[0] == "+":
            groups[int(group)] = mark
        else:
            groups.pop(int(group), None)
    kill(groups)


def kill(groups: Mapping[int, str]) -> None:
    """Kill process groups, and every process that has the mark of one in its environment."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    marks = set(groups.values())
    killed: set[int] = set()
    while found := {pid for pid in _pids() if pid not in killed and _killed(pid, marks)}:
        killed |= found  # until a look finds nobody new: one may have started another meanwhile


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def marked(environ: Mapping[str, str], mark: str) -> str:
    """Return the marks of what is started with ``environ``, this one among them."""
    return ",".join([*filter(None, [environ.get(MARK, "")]), mark])


def _killed(pid: int, marks: set[str]) -> bool:
    """Kill a process if it has one of ``marks``; tell whether it had."""
    if marks.isdisjoint(_marks(pid)):
        return False
    with contextlib.suppress(OSError):  # it has ended
        descriptor = os.pidfd_open(pid)
        if not marks.isdisjoint(_marks(pid)):  # it is that one still
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
    return True


def _marks(pid: int) -> list[str]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []
    named = f"{MARK}=".encode()
    return [
        mark
        for variable in variables
        if variable.startswith(named)
        for mark in variable[len(named) :].decode(errors="replace").split(",")
    ]


if __name__ == "__main__":
    main()
