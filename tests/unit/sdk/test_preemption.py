"""Signals as a wish: noted by a flag, chained to the handlers that were there before."""

import os
import signal
import subprocess
import sys

import pytest

from holdfast.preemption import Preemption


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


def test_without_a_previous_handler_the_exit_code_is_143():
    """F24"""
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption({signal.SIGTERM}, grace_s=60)
    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        preemption.finish()

    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forked_child_dies_of_the_signal_as_if_we_were_not_here():
    script = """
import os, signal
from holdfast.preemption import Preemption
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
