"""One launch of a script: a launcher on each of some nodes, and what can happen to its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from holdfast.embedded import StackNode
from holdfast.errors import InvalidRequestError
from holdfast.testing import processes
from holdfast.testing.waiting import WAIT_S_MAX, tails, until

_LEASH = Path(__file__).with_name("leash.py")


class Launch:
    """A script that runs, or has run, under ``holdfast run``. Made by ``Cluster.launch``.

    ``starter`` starts launchers: Linux ends them with the thread that did, not with its process.
    """

    def __init__(
        self,
        nodes: Mapping[int, StackNode],
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        *,
        starter: Executor,
    ) -> None:
        self._nodes = nodes
        self._command = command
        self._environ = environ
        self._starter = starter
        self._logs = {number: folder / f"{node.name}.log" for number, node in nodes.items()}
        self._processes = {number: self._started(number) for number in nodes}

    @property
    def output(self) -> str:
        """What launchers and ranks of all nodes have printed so far, node by node."""
        return "\n".join(path.read_text(errors="replace") for path in self._logs.values())

    @property
    def is_running(self) -> bool:
        """Whether a launcher has not ended yet."""
        return any(process.poll() is None for process in self._processes.values())

    def until_printed(self, text: str, *, timeout_s: float = WAIT_S_MAX) -> None:
        """Wait until ``text`` stands in ``output``.

        Raises:
            AssertionError: not within ``timeout_s``, or all launchers have ended without it.
        """

        def printed() -> bool:
            ended = not self.is_running  # before the look: what it printed last is there then
            found = text in self.output
            assert found or not ended, f"ended without printing {text!r}\n{self._tails()}"
            return found

        until(printed, f"{text!r} to be printed", timeout_s=timeout_s, logs=self._all_logs())

    def wait(self, *, timeout_s: float = WAIT_S_MAX) -> list[int]:
        """Wait until all launchers have ended; return their exit codes, a signal's negative.

        Raises:
            AssertionError: not within ``timeout_s``.
        """
        until(
            lambda: not self.is_running,
            "the launchers to end",
            timeout_s=timeout_s,
            logs=self._all_logs(),
        )
        return [process.wait() for process in self._processes.values()]

    def succeed(self, *, timeout_s: float = WAIT_S_MAX) -> str:
        """Wait until all launchers have ended with 0; return ``output``.

        Raises:
            AssertionError: one failed, or not within ``timeout_s``; with the end of the logs.
        """
        codes = self.wait(timeout_s=timeout_s)
        assert not any(codes), f"exit codes {codes}\n{self._tails()}"
        return self.output

    def kill_rank(self, rank: int, *, timeout_s: float = WAIT_S_MAX) -> None:
        """Send SIGKILL to a rank, once it trains: all ranks of the launch start again.

        Raises:
            AssertionError: no such rank within ``timeout_s``.
        """
        self._signal(rank, signal.SIGKILL, timeout_s)

    def freeze_rank(self, rank: int, *, timeout_s: float = WAIT_S_MAX) -> None:
        """Send SIGSTOP to a rank, once it trains: it hangs, and others who wait for it.

        Raises:
            AssertionError: no such rank within ``timeout_s``.
        """
        self._signal(rank, signal.SIGSTOP, timeout_s)

    def end(self, *, timeout_s: float = WAIT_S_MAX) -> list[int]:
        """Send SIGTERM to all launchers and wait; return their exit codes.

        Raises:
            AssertionError: not within ``timeout_s``.
        """
        for process in self._processes.values():
            process.terminate()
        return self.wait(timeout_s=timeout_s)

    def kill(self) -> None:
        """Send SIGKILL to all launchers; their ranks die with them."""
        for number in self._processes:
            self.kill_on(number)

    def kill_on(self, node: int) -> None:
        """Send SIGKILL to the launcher of a node, if it takes part; its ranks die with it."""
        if process := self._processes.get(node):
            process.kill()
            process.wait()

    def start_on(self, node: int) -> None:
        """Start the launcher of a node again, as a machine that comes in its place would.

        Raises:
            InvalidRequestError: it runs, or the node takes no part.
        """
        process = self._processes.get(node)
        if process is None or process.poll() is None:
            why = "takes no part" if process is None else "runs"
            raise InvalidRequestError(f"start_on: the launcher of node {node} {why}")
        self._processes[node] = self._started(node)

    def _signal(self, rank: int, number: signal.Signals, timeout_s: float) -> None:
        found: list[int] = []

        def there() -> bool:
            assert self.is_running, f"ended before rank {rank} was found\n{self._tails()}"
            launchers = {process.pid for process in self._processes.values()}
            found[:] = processes.ranks(self._nodes.values(), launchers, rank)
            return bool(found)

        until(there, f"rank {rank} to train", timeout_s=timeout_s, logs=self._all_logs())
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _all_logs(self) -> list[Path]:
        return list(self._logs.values())

    def _tails(self) -> str:
        return tails(self._all_logs())

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        return self._starter.submit(self._start, number).result()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        with self._logs[number].open("ab") as out:
            return subprocess.Popen(  # noqa: S603 - our interpreter, and the script under test
                [sys.executable, str(_LEASH), str(os.getpid()), *self._command],
                env={**self._environ, "HOLDFAST_AGENT": str(self._nodes[number].agent)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
