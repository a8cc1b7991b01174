"""A step that a CUDA graph replays is counted by no hook: what --auto makes of it, and says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.unit.auto.memory import Runs

from holdfast.auto import driver

CAPTURED = "the step of SGD was captured in a CUDA graph"


@pytest.fixture
def runs(tmp_path, monkeypatch, caplog):
    made = Runs(tmp_path / "script.py", monkeypatch, caplog)
    marked = made.path.with_suffix(".captures")
    monkeypatch.setattr(driver, "CUDA", SimpleNamespace(capturing=marked.exists))
    return made


CAPTURE = """
from pathlib import Path
def capture():
    mark = Path(__file__).with_suffix(".captures")
    mark.touch()
    optimizer.step()
    mark.unlink()
"""


def test_a_step_that_was_captured_before_the_first_pass_ends_auto_and_is_told(runs):
    runs.write(
        CAPTURE
        + """
capture()
for epoch in range(2):
    for x, y in loader:
        step(x, y)
result = model
"""
    ).run()

    assert "nothing is saved, the script runs on alone: " + CAPTURED in runs.told
    assert runs.kept == {}


def test_a_step_that_is_captured_in_a_pass_ends_saving_and_is_no_step(runs):
    """Without a word the last step that was counted would be all that is ever saved."""
    runs.write(
        CAPTURE
        + """
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        capture() if (epoch, i) == (2, 3) else step(x, y)
result = model
"""
    ).run()

    assert CAPTURED in runs.told
    assert "nothing is saved from now on" in runs.told
    assert runs.kept[""]["step"] == 15


def test_a_script_that_captures_while_it_catches_up_goes_on_where_it_was(runs):
    """What is there is loaded; only then nothing is saved any more."""
    runs.write(
        CAPTURE
        + """
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        if (epoch, i) == (0, 0) and Path(__file__).with_suffix(".again").exists():
            capture()
        step(x, y)
result = optimizer
"""
    ).run(kill_at=15)
    runs.path.with_suffix(".again").touch()
    runs.run()

    assert CAPTURED in runs.told
    assert runs.steps == 3 + 24 - 14, "it caught up by three, and went on after the 14th"
    assert runs.kept[""]["step"] == 14
