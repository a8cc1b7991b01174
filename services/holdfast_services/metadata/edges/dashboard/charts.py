"""What is known over time: for each committed step how long its copies took. Pure.

The catalogue keeps one row a checkpoint and the newest cost of an attempt. So times and rates of
copies have a history, and the stall has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.byte_sizes import format_bytes
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.model import Checkpoint
from holdfast_services.metadata.edges.dashboard.texts import counted, lasted

POINTS_COUNT_MAX = 200
SHORTEST_S = 1e-3
"""A time below it is not told by two readings of a clock: no rate is reckoned from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart and the sentence that says the same; ``data`` is JSON, times are the x axis."""

    title: str
    caption: str
    data: str


def charts(rows: Sequence[Listed]) -> tuple[Chart, ...]:
    """Return the charts of a run's newest checkpoints; those without a point are left out."""
    ordered = [item.row for item in sorted(rows, key=lambda item: item.row.local_at_s)]
    times = _chart("Seconds from commit to each level", "s", ordered, _seconds)
    rates = _chart("Bytes per second to each level", "B/s", ordered, _rate)
    return tuple(chart for chart in (times, rates) if chart)


def _seconds(row: Checkpoint, at_s: float) -> float | None:
    return max(0.0, at_s - row.local_at_s)


def _rate(row: Checkpoint, at_s: float) -> float | None:
    took_s = at_s - row.local_at_s
    return row.length_bytes / took_s if took_s >= SHORTEST_S else None


def _chart(
    title: str,
    unit: str,
    rows: Sequence[Checkpoint],
    value: Callable[[Checkpoint, float], float | None],
) -> Chart | None:
    lines = {
        "replicated": [_or_none(row, row.replicated_at_s, value) for row in rows],
        "durable": [_or_none(row, row.durable_at_s, value) for row in rows],
    }
    known = {name: found for name, found in lines.items() if any(one is not None for one in found)}
    if not known:
        return None
    data = {
        "unit": unit,
        "x": [round(row.local_at_s, 1) for row in rows],
        "steps": [row.id.step for row in rows],
        "lines": [{"name": name, "y": found} for name, found in known.items()],
    }
    said = "; ".join(_said(name, found, unit) for name, found in known.items())
    caption = f"{counted(len(rows), 'checkpoint')}. {said}."
    return Chart(title=title, caption=caption, data=json.dumps(data, separators=(",", ":")))


def _or_none(
    row: Checkpoint,
    at_s: float | None,
    value: Callable[[Checkpoint, float], float | None],
) -> float | None:
    found = None if at_s is None else value(row, at_s)
    return None if found is None else float(f"{found:.4g}")


def _said(name: str, found: Sequence[float | None], unit: str) -> str:
    values = sorted(one for one in found if one is not None)
    text = lasted if unit == "s" else lambda rate: f"{format_bytes(int(rate))}/s"
    middle, most = values[len(values) // 2], values[-1]
    return (
        f"{name}: half of them within {text(middle)}, the longest {text(most)}"
        if (unit == "s")
        else f"{name}: {text(values[0])} to {text(most)}, in the middle {text(middle)}"
    )
