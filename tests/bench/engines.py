"""Transfer engines of others, each in an interpreter that has its wheel, for fetches in turn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ENGINES = {
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "nixl": "nixl-cu12",
}
"""Their wheels, by name; those that need no GPU."""
PYTHON = os.environ.get("HOLDFAST_BENCH_ENGINES", sys.executable)
"""An interpreter with these wheels."""
END_S_MAX = 10.0


@contextlib.contextmanager
def running(name: str, length_bytes: int) -> Iterator[Callable[[], float] | None]:
    """Run both ends of an engine; each call reads ``length_bytes`` and returns the seconds.

    None where it does not run, and a line on the standard error that says why.
    """
    script = Path(__file__).with_name("engine_process.py")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [PYTHON, str(script), name, str(length_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def read() -> float:
            print(file=stdin, flush=True)
            return float(stdout.readline() or "nan")

        try:
            if stdout.readline() == "ready\n":
                yield read
            else:
                log.seek(0)
                why = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                print(
                    f"fetch_tcp/{name} is not measured: {PYTHON} does not run it ({why}); "
                    f"HOLDFAST_BENCH_ENGINES names an interpreter that has {ENGINES[name]}",
                    file=sys.stderr,
                )
                yield None
        finally:
            with contextlib.suppress(OSError):
                stdin.close()
            try:
                process.wait(timeout=END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
