"""Every loader set-up of the table is bit-identical after a restore, or refused when it is made.

Batches and the training loop's own draws of a run that was saved at many points are compared with
those of fresh objects that were loaded from each of them and went on.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.state.setups import KINDS, SETUPS, Setup, global_numpy, page

import holdfast
from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture
from holdfast.state.loader_makes import continues_by_itself

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("worlds.py")
)
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:The 'repr' parameter"),
]
ROOT = Path(__file__).parents[3]
EPOCHS = 3


@dataclass
class Run:
    """A training process: state, log of all that was drawn, and a pause after every step."""

    loader: Any
    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    log: list[object] = field(default_factory=list)
    pause: Callable[[str], None] = lambda _: None

    def draw(self, batch: object) -> None:
        """Use a batch as a training step with dropout does."""
        self.log.append((repr(batch), torch.rand(1).item(), random.random(), global_numpy()))
        self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
        self.pause("step")

    def end_epoch(self) -> None:
        """Evaluate with draws, as between epochs."""
        self.epoch, self.in_epoch = self.epoch + 1, 0
        self.log.append(("epoch", torch.rand(1).item(), random.random()))
        self.pause("epoch")


def by_for(run: Run) -> None:
    """Loop over every epoch to its end."""
    sampler = getattr(getattr(run.loader, "loader", run.loader), "sampler", None)
    while run.epoch < EPOCHS:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(run.epoch)
        for batch in run.loader:
            run.draw(batch)
        run.end_epoch()


def by_break(run: Run) -> None:
    """Leave the loader after every third step, evaluate, begin anew."""
    while run.epoch < EPOCHS:
        for batch in run.loader:
            run.draw(batch)
            if run.in_epoch == 3:
                break
        run.end_epoch()


def by_count(run: Run) -> None:
    """Draw as many batches as there are and never ask for one more, as Lightning does."""
    while run.step < EPOCHS * len(run.loader):
        iterator = iter(run.loader)
        if run.step % len(run.loader) == 0:
            run.log.append(torch.rand(1).item())
        for _ in range(len(run.loader) - run.step % len(run.loader)):
            run.draw(next(iterator))


def wrapped(setup: Setup, kind: str, *, counted: bool = False) -> Any:
    """Return the loader of a set-up as a user captures it."""
    loader = setup.make(KINDS[kind])
    if kind == "plain" or counted:
        return holdfast.ResumableLoader(loader, counted=counted)
    return loader


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global one, as scripts do


def compare(
    tmp_path: Path, make: Callable[[], Any], loop: Callable[[Run], None], points: set[tuple]
) -> None:
    """Run ``loop`` once undisturbed, once with saves; go on from each; all logs are the same."""
    seed(3)
    calm = Run(make())
    held = Capture({"loader": calm.loader}, rank=0, world_size=1)
    loop(calm)
    held.release()

    seed(3)
    run = Run(make())
    state = {"loader": run.loader, "at": {}}
    capture = Capture(state, rank=0, world_size=1)
    saved = []

    def pause(why: str) -> None:
        if (why, run.step if why == "step" else run.epoch) in points:
            at = {"step": run.step, "epoch": run.epoch, "in_epoch": run.in_epoch}
            state["at"] = at
            folder = tmp_path / f"{why}{len(saved)}"
            folder.mkdir()
            saved.append((why, at, len(run.log), worlds.save_all(folder, [capture])))

    run.pause = pause
    loop(run)
    capture.release()

    assert len(points) == len(saved)
    assert calm.log == run.log
    for why, at, logged, segments in saved:
        seed(99)
        again = Run(make())
        other = Capture({"loader": again.loader, "at": {}}, rank=0, world_size=1)
        with segments as held:
            other.load(held, step=1)
        again.step, again.epoch, again.in_epoch = at["step"], at["epoch"], at["in_epoch"]
        loop(again)
        other.release()

        assert run.log[logged:] == again.log, f"saved after {why} {at}"


def cases(kind: str, *, workers: bool) -> Iterator[Any]:
    for setup in SETUPS:
        if (setup.name.startswith("2 workers")) == workers and getattr(setup, kind) in GOES_ON:
            yield pytest.param(setup, kind, id=f"{kind}-{setup.name}")


GOES_ON = ("replay", "own")
QUICK = [*cases("plain", workers=False), *cases("stateful", workers=False)]
COSTLY = [*cases("plain", workers=True), *cases("stateful", workers=True)]


@pytest.mark.parametrize(("setup", "kind"), QUICK)
def test_each_setup_goes_on_bit_identically(tmp_path, setup, kind):
    """G9; defects L2, L3, L4: inside each epoch, at its last batch, between epochs."""
    points = {("step", step) for step in (1, 2, 3, 5, 6)} | {("epoch", 1), ("epoch", 2)}
    compare(tmp_path, lambda: wrapped(setup, kind), by_for, points)


@pytest.mark.parametrize(("setup", "kind"), COSTLY)
def test_each_setup_with_workers_goes_on_bit_identically(tmp_path, setup, kind):
    """G9; defect L3: what workers draw, too."""
    points = {("step", 2), ("step", 6), ("epoch", 1)}
    compare(tmp_path, lambda: wrapped(setup, kind), by_for, points)


@pytest.mark.parametrize(("setup", "kind"), QUICK)
def test_a_loop_that_leaves_early_begins_a_new_epoch(tmp_path, setup, kind):
    """G9; defect L5: saved in the loop, and between leaving it and the next one."""
    points = {("step", 2), ("epoch", 1), ("step", 5)}
    compare(tmp_path, lambda: wrapped(setup, kind), by_break, points)


@pytest.mark.parametrize(("setup", "kind"), [c for c in QUICK if "iterable" not in c.id])
def test_a_loop_that_counts_does_not_lose_an_epoch(tmp_path, setup, kind):
    """G9; defect X12: saved at the last batch, whose StopIteration is never asked for."""
    count = len(setup.make(KINDS[kind]))
    points = {("step", 1), ("step", count), ("step", count + 2)}
    compare(tmp_path, lambda: wrapped(setup, kind, counted=True), by_count, points)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_each_setup_is_taken_as_the_table_says(setup, kind):
    """The table is what the code does: replayed, by its own state, or refused when captured."""
    expected = getattr(setup, kind)
    if expected not in GOES_ON:
        with pytest.raises(InvalidRequestError, match=expected):
            Capture({"x": wrapped(setup, kind)}, rank=0, world_size=1)
        return
    assert (expected == "own") == continues_by_itself(setup.make(KINDS[kind]))


def test_the_page_shows_this_table():
    text = (ROOT / "docs/explanation/rng-and-loaders.md").read_text()

    assert page() in text, f"put this into the page:\n{page()}"
