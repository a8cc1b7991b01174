"""What the dashboard of a full cluster weighs, and how soon a browser has painted it.

10,000 durable checkpoints of a job of 1,024 ranks on 128 nodes, and of one of 10,240 on 1,280.
Chromium without a window, a new profile each time: nothing is cached. The service runs without a
clock, so that no node is lost.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench.harness import RUNS_MIN, Record
from tests.crowd import JOB, Crowd
from tests.integration.metadata.browser import Browser
from tests.integration.metadata.conftest import running
from tests.integration.metadata.served import served

from holdfast_services.kit.cycles import look_for_cycles_seldom

PATHS = {"": "/", "_job": f"/jobs/{JOB}"}
CROWDS = {"page/first_paint": Crowd(nodes=128), "page/first_paint_10240": Crowd()}
NAMES = tuple(name + tail for name in CROWDS for tail in PATHS)
PAINT_S_MAX = 1.0
BYTES_MAX = 300_000
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
LACKS = "" if BROWSER else "there is no Chromium"
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
LOADED = """[...performance.getEntriesByType("navigation"), ...performance
    .getEntriesByType("resource").filter(one => one.name.includes("/assets/"))]
    .reduce((sum, one) => sum + one.decodedBodySize, 0)"""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the seconds to the first paint of two pages; ``bytes`` are all that was loaded."""
    before = gc.get_threshold()
    look_for_cycles_seldom()  # as the service does
    try:
        for name, crowd in CROWDS.items():
            small = replace(crowd, checkpoints=1000, nodes=16)
            yield from _measure(name, small if quick else crowd)
    finally:
        gc.set_threshold(*before)


def _measure(name: str, crowd: Crowd) -> Iterator[Record]:
    with tempfile.TemporaryDirectory(prefix="hf-") as at:
        folder = Path(at)
        with served(running, f"sqlite:///{folder / 'metadata.db'}", crowd) as here:
            for tail, path in PATHS.items():
                looks = (folder / f"{number}{tail}" for number in range(RUNS_MIN))
                seen = [_look(profile, here.url + path) for profile in looks]
                note = f"{crowd.checkpoints} checkpoints, {crowd.nodes} nodes, {crowd.ranks} ranks"
                yield _record(name + tail, seen, f"{note}, SQLite, {path}")


def _look(profile: Path, url: str) -> tuple[float, int]:
    """Return the seconds to the first paint, and the bytes of the page and all that it loads."""
    assert BROWSER is not None
    with Browser(BROWSER, str(profile)) as page:
        page.open(url)
        page.wait(f"{PAINTED} > 0 && document.readyState === 'complete'")
        return page.value(PAINTED) / 1e3, int(page.value(LOADED))


def _record(name: str, seen: list[tuple[float, int]], note: str) -> Record:
    value_s = statistics.median(paint_s for paint_s, _ in seen)
    length_bytes = max(loaded for _, loaded in seen)
    return Record(
        name=name,
        value=value_s,
        unit="s",
        peer="",
        peer_value=None,
        ratio=value_s / PAINT_S_MAX,
        bytes=length_bytes,
        note=note,
        target=f"<= {PAINT_S_MAX:g} s and <= {BYTES_MAX} bytes",
        met=value_s <= PAINT_S_MAX and length_bytes <= BYTES_MAX,
    )
