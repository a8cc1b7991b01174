"""Brings the Debian packages that tests need and the machine lacks."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

INSTALL_S_MAX = 600
LOCK = Path(tempfile.gettempdir()) / "holdfast-tests-install.lock"


def install(*packages: str) -> None:
    """Install Debian packages when we may; a test that needs them fails otherwise."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    chosen = ["install", "-y", "-q", "--no-install-recommends", *packages]
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers one after the other: apt does not wait
        for command in (["update"], chosen):
            subprocess.run(
                ["apt-get", *command],
                check=True, timeout=INSTALL_S_MAX, env=environment, capture_output=True,
            )  # fmt: skip
