"""What every actuator does with orders for a node: run once, end, tell; the suite of the port.

An actuator says an ``ExecutorReport`` and is told ``Orders``. A *rig* drives one: ``order`` says
what should run, ``report`` what it last said, ``begin`` and ``kill`` start and kill the actuator
itself, ``marks`` what the scripts of launches have left behind; ``job`` is whose launches they are.
"""

from __future__ import annotations

from holdfast.core.executions import Outcome

FOREVER = "forever()"


def states(rig):
    return {(one.job, one.start): one for one in rig.report.launches}


def outcome(rig, start):
    state = states(rig).get((rig.job, start))
    return state.outcome if state else None


def is_running(rig, start):
    return outcome(rig, start) is Outcome.RUNNING


class ActuatorSuite:
    """Mix into a class with the fixture ``rig``."""

    def test_what_is_ordered_runs_once_however_often_it_is_ordered(self, rig):
        rig.script(FOREVER)
        rig.begin()
        rig.order(7, start=3)
        rig.until(lambda: is_running(rig, 3) and rig.report.applied == 7, "it is told to run")
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.order(8, start=3)
        rig.until(lambda: rig.report.applied == 8, "the same order, again")

        assert len(rig.marks()) == 1
        assert len(states(rig)) == 1

    def test_what_ends_well_is_told_and_not_started_again(self, rig):
        rig.script("pass")
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: outcome(rig, 1) is Outcome.ENDED, "it is told to have ended")
        rig.order(2, start=1)
        rig.until(lambda: rig.report.applied == 2, "it is still ordered")

        assert outcome(rig, 1) is Outcome.ENDED
        assert len(rig.marks()) == 1
        rig.order(3)
        rig.until(lambda: not rig.report.launches, "nobody asks for it any more")

    def test_a_script_that_fails_is_told_with_its_exception(self, rig):
        rig.script("raise ValueError('bad batch')")
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: outcome(rig, 1) is Outcome.FAILED, "its failure is told")

        assert "ValueError: bad batch" in states(rig)[rig.job, 1].reason
        assert states(rig)[rig.job, 1].code == 1

    def test_what_cannot_begin_is_refused_with_the_reason(self, rig):
        rig.begin()
        rig.order(1, start=1, folder="/nowhere/at/all")
        rig.until(lambda: outcome(rig, 1) is Outcome.REFUSED, "it is refused")

        assert "/nowhere/at/all" in states(rig)[rig.job, 1].reason

    def test_what_is_not_ordered_any_more_saves_and_ends(self, rig):
        rig.script(
            "signal.signal(signal.SIGTERM, lambda *_: (mark('saved'), sys.exit(0)))\nforever()"
        )
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.order(2)
        rig.until(lambda: not rig.report.launches and rig.report.applied == 2, "it has ended")

        assert "saved" in rig.marks()
        rig.until(lambda: not rig.left(), "nothing of it is left")

    def test_what_does_not_end_is_killed(self, rig):
        rig.script("signal.signal(signal.SIGTERM, lambda *_: None)\nforever()")
        rig.begin()
        rig.order(1, start=1, grace_s=0.5)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.order(2)
        rig.until(lambda: not rig.report.launches, "it has ended")
        rig.until(lambda: not rig.left(), "nothing of it is left")

    def test_what_leaves_is_neither_ended_nor_started(self, rig):
        rig.script(FOREVER)
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.order(2, start=1, leaving=True)
        rig.until(lambda: rig.report.applied == 2, "it is told that it leaves")
        assert is_running(rig, 1)

        rig.order(3, start=9, leaving=True)
        rig.until(lambda: rig.report.applied == 3 and not is_running(rig, 1), "the first is ended")
        assert (rig.job, 9) not in states(rig)

    def test_a_killed_actuator_ends_nothing_and_the_next_one_goes_on(self, rig):
        rig.script(FOREVER)
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.kill()
        rig.begin()
        rig.until(lambda: rig.reports_since_begin and is_running(rig, 1), "it is adopted")

        assert len(rig.marks()) == 1, "and was not started again"
        rig.order(2)
        rig.until(lambda: not rig.report.launches and rig.report.applied == 2, "it is ended")
        rig.until(lambda: not rig.left(), "nothing of it is left")

    def test_what_ends_while_nobody_looks_is_told_afterwards(self, rig):
        rig.script("wait_for('go')")
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.kill()
        rig.leave("go")
        rig.until(lambda: not rig.left(), "it has ended")
        rig.begin()
        rig.until(lambda: outcome(rig, 1) is Outcome.ENDED, "its ending is told")

    def test_a_launcher_that_is_killed_is_told_as_such(self, rig):
        rig.script(FOREVER)
        rig.begin()
        rig.order(1, start=1)
        rig.until(lambda: len(rig.marks()) == 1, "it runs")
        rig.kill_launch(1)
        rig.until(lambda: outcome(rig, 1) is Outcome.KILLED, "it is told to have been killed")
        rig.until(lambda: not rig.left(), "its ranks went with it")
