"""What measuring the noise of gradients costs an update, and how well steps are predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.harness import Record
from tests.servers.processes import free_port

from holdfast.goodput.fit import Measured, fit

NAMES = ("elastic/measure", "elastic/step_error")
RANK = Path(__file__).with_name("elastic_rank.py")
SHARE_MAX, ERROR_MAX = 0.10, 0.10
SIZES = (8, 16, 32, 64, 128, 192)
HELD_OUT = ((1, 16), (1, 64), (2, 32), (2, 128))
"""Replicas and micro-batch: what the fit is not told."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield both records, of two ranks for two cores."""
    found = _launched(2, 10 if quick else 40)
    yield _cost(found)
    yield _error(found["points"])


def _cost(found: dict[str, Any]) -> Record:
    """Of two ranks, where each gradient is looked at before and after it is averaged."""
    plain, ours = found["medians"]
    share = ours / plain - 1
    return Record(
        name="elastic/measure",
        value=share * 100,
        unit="%",
        peer="plain DDP",
        peer_value=plain * 1e3,
        ratio=share / SHARE_MAX,
        bytes=4 * found["parameters"],
        note=f"an update of {ours * 1e3:.1f} ms beside {plain * 1e3:.1f} ms, "
        f"{found['parameters'] / 1e6:.1f} million parameters, 128 samples, "
        f"2 ranks, seconds that a rank computes, in turn, "
        f"n={len(found['times'][0])}",
        target=f"<= {SHARE_MAX:.0%}",
        met=share <= SHARE_MAX,
    )


def _error(points: list[dict[str, Any]]) -> Record:
    """The worst error of a step time that the fit was not told."""
    measured = {
        (p["replicas"], p["local"]): Measured(
            nodes=1, replicas=p["replicas"], local_batch=p["local"],
            compute_s=p["compute"], step_s=p["step"],
        )
        for p in points
    }  # fmt: skip
    model = fit([point for where, point in measured.items() if where not in HELD_OUT])
    errors = {where: model.step_s(1, *where) / measured[where].step_s - 1 for where in HELD_OUT}
    worst = max(map(abs, errors.values()))
    told = ", ".join(f"{r} x {m}: {error:+.1%}" for (r, m), error in errors.items())
    return Record(
        name="elastic/step_error",
        value=worst * 100,
        unit="%",
        peer="limit",
        peer_value=ERROR_MAX * 100,
        ratio=worst / ERROR_MAX,
        bytes=0,
        note=f"fitted to {len(measured) - len(HELD_OUT)} configurations, held out (replicas x "
        f"samples) {told}",
        target=f"<= {ERROR_MAX:.0%}",
        met=worst <= ERROR_MAX,
    )


def _launched(ranks: int, runs: int) -> dict[str, Any]:
    """Return what rank 0 of so many has printed."""
    port = free_port()
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_RANK": rank}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        environ = os.environ | {name: str(value) for name, value in (place | where).items()}
        command = [sys.executable, "-W", "ignore", str(RANK), str(runs), *map(str, SIZES)]
        started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert not any(process.returncode for process in started), "a rank failed: see above"
    return json.loads(outputs[0])  # type: ignore[no-any-return]
