"""Histories as stories: one lived through and told, and those that are kept in ``stories/``.

A story's file holds a plan that once broke a promise. What it told then stands above the plan as
a comment, for people; tests live through the plan again.
"""

from __future__ import annotations

import gc
import json
import time
import tomllib
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.simulation.checks import Broken
from tests.simulation.history import History
from tests.simulation.plan import Plan, draw, from_toml, to_toml

FOLDER = Path(__file__).parent / "stories"
LINES_MAX = 80
FIRST_LINES = 20
BROKE_LENGTH_MAX = 300

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """A history that is over.

    Attributes:
        story: What happened, a line each.
        broke: The first line of what it broke; empty: every promise held.
        promise: What tells one breakage from another: "P5", or where an error that is no broken
            promise was raised.
        trace: The stack when it broke.
        cpu_s: How long a core was busy with it.
    """

    story: tuple[str, ...] = ()
    broke: str = ""
    promise: str = ""
    trace: str = ""
    events_count: int = 0
    commits_count: int = 0
    restores_count: int = 0
    cpu_s: float = field(default=0.0, compare=False)


def live(plan: Plan) -> Lived:
    """Live through the plan; whatever is raised meanwhile is how it ended."""
    began_s = time.process_time()
    history, broke, promise, trace = None, "", "", ""
    with ExitStack() as end:
        # One history leaves a few MiB of cycles; to look for them while it lives is a tenth of it.
        gc.disable()
        end.callback(gc.enable)
        try:
            history = History(plan)
            end.callback(history.close)
            history.run()
        except Exception as error:
            broke, promise = _named(error)
            trace = traceback.format_exc()
        if history is None:
            return Lived(broke=broke, promise=promise, trace=trace)
        return Lived(
            story=tuple(history.world.story),
            broke=broke,
            promise=promise,
            trace=trace,
            events_count=history.world.events_count,
            commits_count=history.commits_count,
            restores_count=history.restores_count,
            cpu_s=time.process_time() - began_s,
        )


def live_seed(seed: int) -> Lived:
    """Live through a seed's plan; return how it ended, without the story: light to hand over."""
    return replace(live(draw(seed)), story=(), trace="")


def _named(error: Exception) -> tuple[str, str]:
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, Broken):
        return text[:BROKE_LENGTH_MAX] or "Broken", text.partition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(_ROOT) and "site-packages" not in frame.filename
    ]
    last = (ours or frames)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    name = type(error).__name__
    return f"{name}: {text or place}"[:BROKE_LENGTH_MAX], f"{name} at {place}"


def write(path: Path, plan: Plan, title: str, breaks: str, story: Sequence[str]) -> None:
    """Write a plan to ``path`` with the story that it tells now and what it breaks."""
    told = [title, "", f"It broke {breaks}", "", *_shortened(story)]
    lines = [
        *(f"# {' '.join(line.splitlines())}".rstrip() for line in told),
        "",
        f"title = {_quoted(title)}",
        f"broke = {_quoted(breaks)}",
        "",
        to_toml(plan),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")


def _shortened(story: Sequence[str]) -> list[str]:
    """Return how it began and how it ended, at most ``LINES_MAX`` lines of it."""
    if len(story) <= LINES_MAX:
        return list(story)
    last = LINES_MAX - FIRST_LINES - 1
    left_out = len(story) - FIRST_LINES - last
    return [*story[:FIRST_LINES], f"      ...  {left_out} lines are left out", *story[-last:]]


def _quoted(text: str) -> str:
    """Return a basic string of TOML: what JSON writes is one."""
    return json.dumps(text, ensure_ascii=False)


def read(path: Path) -> tuple[str, Plan]:
    """Return a story's title and its plan."""
    text = path.read_text(encoding="utf-8")
    return tomllib.loads(text)["title"], from_toml(text)


def all_stories() -> list[Path]:
    """Return the files of all stories that are kept, by name."""
    return sorted(FOLDER.glob("*.toml"))
