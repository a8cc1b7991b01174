"""How the stall of ``ck.step`` grows with the number of tensors, the bytes being the same."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.harness import Record
from tests.bench.stall import everything
from tests.bench.subject import agent

STALL_MS_MAX = {
    "step_1_tensor": (1, 1.0),
    "step_200_tensors": (200, 1.0),
    "step_1k_tensors": (1_000, 5.0),
    "step_10k_tensors": (10_000, 5.0),
    "step_100k_tensors": (100_000, 5.0),
}
"""Of each record the parameters and moments, and what a save may cost, in ms."""
NAMES = tuple(f"stall/{name}" for name in STALL_MS_MAX)


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the records, fewest tensors first; the fewest are one parameter and its two moments."""
    length_bytes = (1 << 30) // (16 if quick else 1)
    with agent(nodes=2):
        for name, (tensors_count, ms_max) in STALL_MS_MAX.items():
            yield everything(name, max(3, tensors_count), length_bytes, ms_max=ms_max)
