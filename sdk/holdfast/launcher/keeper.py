"""Ends what a launcher has started, if the launcher is killed: no process outlives it.

Run by its file name. It reads ``+GROUP`` and ``-GROUP`` from its input, and kills the process
groups that are left when that ends. Ranks die by themselves then; this is for what they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the launcher has gone, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
