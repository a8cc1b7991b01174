"""Charts as SVG: lines over an axis, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 36
COLORS = ("#0b6e4f", "#c1440e", "#2a5caa", "#8a5a00", "#6b3fa0", "#444444")
POINTS_MAX = 600
TICKS = 5


def chart(
    title: str, lines: Mapping[str, Points], *, across: str, up: str, log: bool = False
) -> str:
    """Return a chart of named lines.

    Args:
        title: Above it.
        lines: Points by ascending x; beyond ``POINTS_MAX`` some are left out.
        across: What x is.
        up: What y is.
        log: The axis of x is logarithmic; x below 1 counts as 1.
    """
    drawn = {name: _thinned(points) for name, points in lines.items()}
    xs = [_scaled(x, log=log) for points in drawn.values() for x, _ in points] or [0.0]
    ys = [y for points in drawn.values() for _, y in points] or [0.0]
    low_x = min(xs)
    high_x = max(*xs, low_x + 1e-9)
    high_y = max(ys) or 1.0
    body = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>',
        *_axes(low_x, high_x, high_y, log=log),
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(across)}</text>',
        f'<text x="4" y="{TOP - 4}">{escape(up)}</text>',
    ]
    for at, (name, points) in enumerate(drawn.items()):
        places = [
            (
                LEFT + (_scaled(x, log=log) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - y / high_y * (HEIGHT - TOP - BOTTOM),
            )
            for x, y in points
        ]
        color = COLORS[at % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}"/>')
        body.append(
            f'<text x="{WIDTH - RIGHT - 100}" y="{TOP + 14 * (at + 1)}" fill="{color}">'
            f"{escape(name)}</text>"
        )
    return "\n".join((*body, "</svg>"))


def cumulative(values: Sequence[float]) -> Points:
    """Return the share of values up to each of them."""
    ordered = sorted(values)
    return [(value, (at + 1) / len(ordered)) for at, value in enumerate(ordered)]


def _axes(low_x: float, high_x: float, high_y: float, *, log: bool) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    found = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888"/>']
    for at in range(TICKS):
        share = at / (TICKS - 1)
        x = low_x + share * (high_x - low_x)
        at_x = LEFT + share * (right - LEFT)
        at_y = bottom - share * (bottom - TOP)
        text = _number(10**x if log else x)
        found.append(f'<text x="{at_x:.1f}" y="{bottom + 14}" text-anchor="middle">{text}</text>')
        found.append(
            f'<text x="{LEFT - 4}" y="{at_y + 4:.1f}" text-anchor="end">'
            f"{_number(share * high_y)}</text>"
        )
    return found


def _scaled(x: float, *, log: bool) -> float:
    return math.log10(max(x, 1.0)) if log else x


def _thinned(points: Points) -> Points:
    step = -(-len(points) // POINTS_MAX) or 1
    last = points[-1:] if len(points) % step != 1 and step > 1 else []
    return [*points[::step], *last]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
