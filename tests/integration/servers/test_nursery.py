"""A rank that the nursery forks ends as one that was started from nothing, only sooner."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.servers.nursery import NURSERY

BEGINS = """
import atexit, sys, threading, time
atexit.register(lambda: print("left after", repr(getattr(sys, "last_value", None))))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
print("begun")
"""
ENDINGS = {
    "returns": "",
    "exits": "sys.exit()",
    "exits with a code": "sys.exit(3)",
    "exits with words": "sys.exit('no more')",
    "raises": "raise ValueError('a bug')",
    "kills itself": "import os; sys.stdout.flush(); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_rank_ends_as_the_interpreter_has_it(tmp_path, ending):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(BEGINS + ending)
    true = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip

    child = NURSERY.start(script, env=dict(os.environ), log=log)

    assert child.wait(60) == true.returncode
    assert without_frames(log.read_text()) == without_frames(true.stdout)


def without_frames(text: str) -> list[str]:
    """Return the lines but for those of frames, of which the nursery has some of its own."""
    return [line for line in text.splitlines() if not line.startswith("  ")]
