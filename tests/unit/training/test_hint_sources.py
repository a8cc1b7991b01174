"""Who knows how a job scales is found in its state, and believed within reason (F106)."""

import logging
import math

from holdfast.core.announcements import SaveReason
from holdfast.core.hints import JobHints
from holdfast.core.reports import RankReport
from holdfast.core.save_interval import Wish
from holdfast.training.hint_sources import HintSources
from holdfast.training.progress import Progress


class Knows:
    def __init__(self, hints):
        self.hints = hints

    def job_hints(self):
        return self.hints


HINTS = JobHints(initial_batch=8, batch=16, batch_max=32)


def test_the_first_that_knows_anything_is_believed_wherever_it_is():
    state = {"n": 1, "loaders": {"eval": Knows(None), "train": [Knows(HINTS)]}, "other": Knows(3)}

    assert HintSources(state).hints() == HINTS
    assert HintSources({"n": 1}).hints() is None


def test_what_cannot_be_is_not_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert HintSources({"x": Knows(JobHints(var=math.nan))}).hints() is None

    assert "var is nan" in caplog.text


def test_a_state_that_is_filled_after_a_decision_is_looked_at_when_training_goes_on():
    state = {}
    progress = Progress.of(state)
    state["loader"] = Knows(HINTS)
    report = progress.told(
        RankReport(), wish=Wish(), wants_save=SaveReason.UNSPECIFIED, stall_s=0.0, stalled_s=0.0
    )

    assert report.hints == HINTS
