"""``elastic_trainer.py`` as it ends when nothing happens to it: what others are compared with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.stack import environment

SCRIPT = Path(__file__).with_name("elastic_trainer.py")
END_S_MAX = 200.0


def bits_in_peace(steps: int) -> list[str]:
    """Return what one rank without services prints as ``final`` after so many steps."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", str(steps)],
        env=environment(), capture_output=True, text=True, check=True, timeout=END_S_MAX,
    )  # fmt: skip
    return re.findall(r"^final (\w+)$", done.stdout, re.MULTILINE)
