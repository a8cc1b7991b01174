"""Brings the Debian packages that tests need and the machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess

INSTALL_S_MAX = 600


def install(*packages: str) -> None:
    """Install Debian packages when we may; a test that needs them fails otherwise."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
            subprocess.run(
                ["apt-get", *command],
                check=True, timeout=INSTALL_S_MAX, env=environment, capture_output=True,
            )  # fmt: skip
