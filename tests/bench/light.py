"""What it costs to import Holdfast into a script that may not even use torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from tests.bench.harness import Record, in_turn

NAMES = ("import/seconds",)
LIMIT_S = 0.15
IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
NO_TORCH = "; import sys; assert not {'torch', 'grpc'} & sys.modules.keys()"


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield one record, against the limit of the interface; torch beside it for scale."""
    ours_s, torch_s = in_turn(
        lambda: _run(IMPORT.format("holdfast") + NO_TORCH),
        lambda: _run(IMPORT.format("torch")),
        runs=5 if quick else 9,
    )
    value = statistics.median(ours_s)
    yield Record(
        name="import/seconds",
        value=value,
        unit="s",
        peer="limit",
        peer_value=LIMIT_S,
        ratio=value / LIMIT_S,
        bytes=0,
        note=f"fresh processes, neither torch nor grpc imported; "
        f"import torch: {statistics.median(torch_s):.2f} s",
        target=f"<= {LIMIT_S} s",
        met=value <= LIMIT_S,
    )


def _run(code: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout)
