"""Run a command that gets a signal when whoever started it dies: ``leash.py SIGKILL COMMAND …``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.Signals[sys.argv[1]])
    os.execvp(sys.argv[2], sys.argv[2:])
