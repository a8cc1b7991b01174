"""The executor, ``holdfast execute``, as an actuator: real processes, and a scheduler that only
says orders.
"""

from __future__ import annotations

import signal

import pytest
from tests.contract.actuators import ActuatorSuite
from tests.contract.executor_rig import Rig, standing


@pytest.fixture
def rig():
    with standing(Rig) as made:
        yield made


class TestExecutor(ActuatorSuite):
    """The suite."""


def test_sigterm_ends_the_executor_alone(rig):
    rig.script("forever()")
    rig.begin()
    rig.order(1, start=1)
    rig.until(lambda: len(rig.marks()) == 1, "it runs")
    rig.process.send_signal(signal.SIGTERM)

    assert rig.process.wait(30) == 128 + signal.SIGTERM
    assert rig.left(), "what it has started trains on"
    rig.begin()
    rig.until(lambda: rig.reports_since_begin and rig.report.launches, "it is adopted")


def test_two_executors_of_one_folder_are_one_too_many(rig):
    rig.begin()
    rig.until(lambda: rig.report.gpus == 2, "the first is there")
    first = rig.process
    rig.begin()

    assert rig.process.wait(60) == 1
    assert "another executor runs in" in rig.said()
    rig.process = first


def test_a_restarted_executor_is_the_same_one_and_its_reports_count(rig):
    rig.begin()
    rig.until(lambda: rig.report.gpus == 2, "it reports")
    name, sequence = rig.report.executor, rig.report.sequence
    rig.kill()
    rig.begin()
    rig.until(lambda: rig.report.sequence > sequence, "its next life is numbered higher")

    assert name == rig.report.executor
