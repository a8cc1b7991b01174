"""Runs a command that is killed when whoever started it dies; run by its file name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it died meanwhile
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - it is what a test wants to run
