"""What the dashboard of a full cluster weighs, and how soon a browser has painted it.

10,000 durable checkpoints of a job of 10,240 ranks on 1,280 nodes. Chromium without a window, a new
profile each time: nothing is cached. The service runs without a clock, so that no node is lost.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import RUNS_MIN, Record
from tests.crowd import JOB, Crowd
from tests.integration.metadata.browser import Browser
from tests.integration.metadata.conftest import running
from tests.integration.metadata.served import served

NAMES = ("page/first_paint", "page/first_paint_job")
PATHS = ("/", f"/jobs/{JOB}")
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
    crowd = Crowd(checkpoints=1000, nodes=16) if quick else Crowd()
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder = Path(name)
        with served(running, f"sqlite:///{folder / 'metadata.db'}", crowd) as here:
            for record, path in zip(NAMES, PATHS, strict=True):
                seen = [_look(folder / f"{number}{record[5:]}", here.url + path)
                        for number in range(RUNS_MIN)]  # fmt: skip
                note = f"{crowd.checkpoints} checkpoints, {crowd.nodes} nodes, {crowd.ranks} ranks"
                yield _record(record, seen, f"{note}, SQLite, {path}")


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
