"""Signals as a wish: noted by a flag, chained to the handlers that were there before."""

import os
import signal
import subprocess
import sys

import pytest

from holdfast.training.preemption import Preemption


def test_the_handler_only_sets_a_flag_and_finish_chains_to_the_previous_one():
    """F24"""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        preemption = Preemption({signal.SIGTERM}, grace_s=60)
        os.kill(os.getpid(), signal.SIGTERM)

        assert preemption.asked
        assert 0 < preemption.left_s <= 60
        assert seen == []

        preemption.finish()

        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_put_back_first_are_still_chained_to():
    """F24: the checkpointer closes, and with it takes its handler out, before it ends."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        preemption = Preemption({signal.SIGTERM}, grace_s=60)
        os.kill(os.getpid(), signal.SIGTERM)
        preemption.uninstall()
        preemption.finish()

        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def no_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_without_a_previous_handler_the_exit_code_is_143(no_handler):
    """F24"""
    preemption = Preemption({signal.SIGTERM}, grace_s=60)
    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        preemption.finish()

    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_forked_child_dies_of_the_signal_as_if_we_were_not_here():
    script = """
import os, signal
from holdfast.training.preemption import Preemption
preemption = Preemption({signal.SIGTERM}, grace_s=60)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
assert not preemption.asked
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=env)


class Clock:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


def raise_at(clock, now_s):
    clock.now_s = now_s
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("again_s", [102.5, 161.0, 4000.0])
def test_a_signal_sent_again_goes_to_the_previous_handler(again_s):
    """Defect C5: a loop that hangs, or has ended, can be ended; within or after the grace period.

    The same signal within a moment is the terminal's and the launcher's: one wish.
    """
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    clock = Clock()
    preemption = Preemption({signal.SIGTERM}, grace_s=60, clock=clock)
    try:
        raise_at(clock, 100.0)
        raise_at(clock, 101.0)
        assert seen == []

        raise_at(clock, again_s)
        assert seen == [signal.SIGTERM]
    finally:
        preemption.uninstall()
        signal.signal(signal.SIGTERM, before)


def run_script(script):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=60, env=env
    ).returncode


def test_a_second_ctrl_c_ends_a_loop_that_never_steps():
    """Defect C5: by KeyboardInterrupt, as without us."""
    script = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from holdfast.training.preemption import Preemption
now = [0.0]
preemption = Preemption({signal.SIGINT}, grace_s=60, clock=lambda: now[0])
signal.raise_signal(signal.SIGINT)
now[0] = 5.0
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    assert run_script(script) == 7


def test_a_signal_that_is_ignored_stays_ignored():
    """Defect S1: nohup and ``&`` in a script ignore SIGINT; here and in a forked child."""
    script = """
import os, signal
from holdfast.training.preemption import Preemption
signal.signal(signal.SIGINT, signal.SIG_IGN)
preemption = Preemption({signal.SIGINT, signal.SIGTERM}, grace_s=60)
signal.raise_signal(signal.SIGINT)
assert not preemption.asked
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGINT)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
preemption.uninstall()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    assert run_script(script) == 0


def test_all_checkpointers_of_a_process_hear_of_a_signal_and_the_last_one_ends_it(no_handler):
    """One handler per process: who has saved waits for the others, within the grace period."""
    first, second = (Preemption({signal.SIGTERM}, grace_s=60) for _ in range(2))
    signal.raise_signal(signal.SIGTERM)
    assert first.asked
    assert second.asked

    first.done = True
    assert first.waits_for_others
    second.done = True
    assert not first.waits_for_others

    second.uninstall()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    with pytest.raises(SystemExit) as ended:
        first.finish()

    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_put_over_ours_may_call_ours():
    """Ours passes on to it what nobody here waits for, and is not asked again."""
    seen = []
    before = signal.getsignal(signal.SIGTERM)
    first = Preemption({signal.SIGTERM}, grace_s=60)
    ours = signal.getsignal(signal.SIGTERM)

    def theirs(number, frame):
        seen.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    try:
        first.uninstall()
        second = Preemption({signal.SIGTERM}, grace_s=60)
        second.uninstall()
        ours(signal.SIGTERM, None)

        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
