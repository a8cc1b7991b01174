"""``holdfast.locks``: record locks between processes, as the kernel keeps them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast import locks

HOLD = """
import sys
from holdfast import locks
file = open(sys.argv[1], "r+b")
print(locks.take(file.fileno()), flush=True)
for line in sys.stdin:
    locks.release(file.fileno())
    print("released", flush=True)
"""


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "lock"
    made.touch()
    return made


@pytest.fixture
def descriptor(path):
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def other(path):
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.stdin.close()


def test_one_process_has_a_lock_until_it_gives_it_back(descriptor, other):
    taken = locks.take(descriptor)
    other.stdin.write("release\n")
    other.stdin.flush()

    assert not taken
    assert "released\n" == other.stdout.readline()
    assert locks.take(descriptor)


def test_the_kernel_gives_the_lock_of_a_killed_process_back(path, descriptor, other):
    holders = [locks.holder(descriptor), locks.holder_of(path)]
    other.kill()
    other.wait()

    assert [other.pid] * 2 == holders
    assert locks.holder(descriptor) is None
    assert locks.take(descriptor)


def test_asking_takes_no_lock(path, descriptor):
    assert locks.holder(descriptor) is None

    command = [sys.executable, "-c", HOLD, str(path)]
    taken = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout

    assert "True\n" == taken


def test_nobody_holds_a_file_that_is_gone_or_a_link(tmp_path, path, other):
    link = tmp_path / "link"
    link.symlink_to(path)

    assert locks.holder_of(path) == other.pid
    assert locks.holder_of(link) is None
    assert locks.holder_of(tmp_path / "gone") is None
