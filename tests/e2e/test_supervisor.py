"""The supervisor's shell with stand-in children: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import UnavailableError
from holdfast_services.supervisor.children import Spec
from holdfast_services.supervisor.domain.restarts import METADATA
from holdfast_services.supervisor.service import Supervisor

WAIT_S_MAX = 30.0

# Says its pid, then sleeps; ends at SIGTERM like a service does.
CHILD = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("line of " + sys.argv[1], flush=True)
new = pathlib.Path(sys.argv[2] + ".new")
new.write_text(str(os.getpid()))
new.replace(sys.argv[2])
signal.sigwait({signal.SIGTERM})
with open(sys.argv[3], "a") as log:
    log.write(sys.argv[1] + "\\n")
"""


class Stage:
    """Specs of stand-in children in a folder, and what they did."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder = folder
        self.specs = [self._spec(name) for name in names]
        self.published_count = 0

    def publish(self) -> None:
        self.published_count += 1

    def pid(self, name: str) -> int | None:
        file = self._folder / name
        return int(file.read_text()) if file.exists() else None

    def stop_order(self) -> list[str]:
        return (self._folder / "order").read_text().split()

    def _spec(self, name: str) -> Spec:
        async def probe(first: bool) -> None:
            if self.pid(name) is None:
                raise UnavailableError("not yet")

        arguments = (name, str(self._folder / name), str(self._folder / "order"))
        command = (sys.executable, "-c", CHILD, *arguments)
        return Spec(name=name, command=command, environ=dict(os.environ), probe=probe)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_child_comes_back_and_all_end_in_order(tmp_path):
    stage = Stage(tmp_path, (METADATA, "a"))
    supervisor = Supervisor(stage.specs, idle_exit_s=0.0, needs=lambda: 0, publish=stage.publish)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: stage.published_count == 1)
    first = stage.pid("a")
    os.kill(first, signal.SIGKILL)
    await until(lambda: stage.pid("a") != first)
    pids = [stage.pid(METADATA), stage.pid("a")]
    stop.set()
    await asyncio.wait_for(running, WAIT_S_MAX)

    assert stage.stop_order() == ["a", METADATA]
    assert all(gone(pid) for pid in pids)
    assert stage.published_count == 1


async def test_lines_of_children_reach_the_log_with_their_name(tmp_path, caplog):
    caplog.set_level("INFO")
    stage = Stage(tmp_path, (METADATA,))
    supervisor = Supervisor(stage.specs, idle_exit_s=0.0, needs=lambda: 0, publish=stage.publish)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: ("child.metadata", 20, "line of metadata") in caplog.record_tuples)
    stop.set()
    await asyncio.wait_for(running, WAIT_S_MAX)


async def test_a_stack_that_cannot_start_says_which_child_failed(tmp_path):
    broken = Spec(
        name=METADATA,
        command=(sys.executable, "-c", "raise SystemExit(7)"),
        environ={},
        probe=Stage(tmp_path, (METADATA,)).specs[0].probe,
    )
    supervisor = Supervisor([broken], idle_exit_s=0.0, needs=lambda: 0, publish=pytest.fail)

    with pytest.raises(UnavailableError, match="metadata exited with code 7 3 times"):
        await asyncio.wait_for(supervisor.run(asyncio.Event()), WAIT_S_MAX)


async def test_an_idle_stack_ends_itself(tmp_path):
    stage = Stage(tmp_path, (METADATA, "a"))
    supervisor = Supervisor(stage.specs, idle_exit_s=0.1, needs=lambda: 0, publish=stage.publish)
    await asyncio.wait_for(supervisor.run(asyncio.Event()), WAIT_S_MAX)

    assert stage.stop_order() == ["a", METADATA]
