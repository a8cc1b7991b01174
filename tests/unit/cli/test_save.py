"""What ``save`` says, and how long it waits; with a real job, see ``tests/e2e/test_users.py``."""

from __future__ import annotations

import pytest

from holdfast.cli import save as module
from holdfast.cli.arguments import parser
from holdfast.cli.rest import Rest
from holdfast.cli.save import save
from holdfast.errors import OutcomeUnknownError, PreconditionError

REASON = "an operator asked for it"


@pytest.fixture
def saves(monkeypatch):
    """Return a function that runs the command while a job gets on as its states say."""
    monkeypatch.setattr(module, "POLL_S", 0.0)

    def run(*options, states=()):
        found = iter(states)

        class Service:
            def of_job(self, method, job, path):
                assert (method, job, path) == ("POST", "gpt", "/save")
                return {"step": 12, "reason": REASON}

            def job(self, _):
                newest, running = next(found)
                return {"newest_step": newest, "running": running}

        monkeypatch.setattr(Rest, "find", lambda _: Service())
        return save(parser().parse_args(["save", "gpt", *options]), {})

    return run


def test_without_a_wait_the_step_and_the_reason_are_told(saves):
    report = saves()

    assert [f"all ranks of gpt save step 12: {REASON}"] == report.text
    assert {"job": "gpt", "step": 12, "reason": REASON} == report.data


def test_with_one_it_ends_once_the_step_or_a_later_one_is_safe(saves):
    report = saves("--wait", "60s", states=[(None, True), (11, True), (13, True)])

    assert ["step 12 of gpt is safe"] == report.text


def test_a_step_that_was_safe_before_its_job_ended_is_safe(saves):
    assert ["step 12 of gpt is safe"] == saves("--wait", "60s", states=[(12, False)]).text


def test_a_job_that_ends_before_the_step_is_safe_is_not_waited_for(saves):
    with pytest.raises(PreconditionError, match="has ended before step 12"):
        saves("--wait", "60s", states=[(11, True), (11, False)])


def test_what_takes_too_long_may_happen_yet(saves):
    with pytest.raises(OutcomeUnknownError, match=r"not safe after 0\.001 s, and may be soon"):
        saves("--wait", "0.001s", states=((11, True) for _ in iter(int, 1)))
