"""Starts a command that outlives whoever asked for it: ``python -m … LOG COMMAND ARGUMENT...``.

Prints its pid, and ends. The command is nobody's child, so who ends all children of a worker, as
Ray does, does not end it; it takes over neither blocked signals nor, where that is allowed, a
lower priority.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main(log: str, command: list[str]) -> None:
    """Become two processes: one becomes the command, the other says which."""
    os.setsid()
    child = os.fork()
    if child:
        sys.stdout.write(f"{child}\n")
        return
    nowhere = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, descriptor in enumerate((nowhere, written, written)):
        os.dup2(descriptor, number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.execv(command[0], command)  # noqa: S606 - without a shell is what is meant


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
