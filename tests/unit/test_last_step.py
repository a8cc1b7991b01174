"""A rank's last step lies in memory that its launcher keeps, and nowhere else."""

import os
import subprocess
import sys

import pytest

from holdfast.last_step import VARIABLE, LastStep

ENDS = "import os; from holdfast import last_step; {before}last_step.keep(7); os._exit(1)"


@pytest.fixture
def kept():
    return LastStep()


def rank(kept, before="", number=None):
    environ = {**os.environ, VARIABLE: str(kept.descriptor) if number is None else number}
    command = [sys.executable, "-c", ENDS.format(before=before)]
    done = subprocess.run(command, env=environ, pass_fds=(kept.descriptor,), check=False)
    assert done.returncode == 1


def test_a_step_is_known_though_its_process_said_nothing_at_its_end(kept):
    rank(kept)

    assert kept.close() == 7


def test_a_process_that_completed_none_has_none(kept):
    assert kept.close() == -1


@pytest.mark.parametrize("number", ["", "x", "-1", "9999"])
def test_a_process_without_that_memory_keeps_none(kept, number):
    rank(kept, number=number)

    assert kept.close() == -1


def test_what_has_its_number_by_now_is_left_alone(kept, tmp_path):
    """A script may close what it does not know, and open something of its own."""
    path = tmp_path / "of-the-script"
    path.write_bytes(b"12345678")
    number = kept.descriptor
    rank(kept, before=f"os.dup2(os.open({str(path)!r}, os.O_RDWR), {number}); ")

    assert path.read_bytes() == b"12345678"
    assert kept.close() == -1


@pytest.mark.parametrize(("written", "step"), [(b"\xff" * 7 + b"\x80", -1), (b"", -1)])
def test_memory_that_a_script_has_spoilt_tells_no_step(kept, written, step):
    os.truncate(kept.descriptor, 0)
    os.pwrite(kept.descriptor, written, 0)

    assert kept.close() == step
