"""A cluster on one machine: the services of some nodes, in a folder that is removed at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from holdfast.embedded import (
    Stack,
    StackRequest,
    ensure_stack,
    erase_stack,
    require_services,
    stop_stack,
)
from holdfast.errors import InvalidRequestError, NotFoundError, UnavailableError
from holdfast.rpc import rest
from holdfast.testing import processes
from holdfast.testing.launch import Launch
from holdfast.testing.waiting import WAIT_S_MAX, until

_IDLE_EXIT_S = 600.0
"""A stack that nobody trains on ends by itself: one that was left behind, that is."""


class Cluster:
    """Services of ``nodes`` nodes. A context manager: it starts them, and leaves nothing behind.

    Args:
        nodes: How many; each has an agent, memory of its own, and room for a launcher.
        settings: Environment variables of services, launchers and scripts, such as
            ``HOLDFAST_NODE_LEASE_S``. Of the tests' own environment those that begin with
            ``HOLDFAST_`` are not passed on.

    Raises:
        InvalidRequestError: on entering, the services are not installed.
        UnavailableError: on entering, they did not start.
    """

    def __init__(self, nodes: int = 1, *, settings: Mapping[str, str] | None = None) -> None:
        if type(nodes) is not int or nodes < 1:
            raise InvalidRequestError(f"Cluster takes a number of nodes from 1, not {nodes!r}")
        clean = {key: text for key, text in os.environ.items() if not key.startswith("HOLDFAST_")}
        self._environ = {**clean, **_variables("Cluster: settings", settings or {})}
        self._nodes_count = nodes
        self._launches: list[Launch] = []
        self._numbers = itertools.count(1)
        self._running: Stack | None = None
        self._starter = ThreadPoolExecutor(1, "holdfast-launches")  # its end would end launchers

    def __enter__(self) -> Self:
        require_services()
        # A short name: the path of a Unix socket has at most 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="hf-"))
        request = StackRequest(nodes_count=self._nodes_count, idle_exit_s=_IDLE_EXIT_S)
        with contextlib.ExitStack() as undo:
            undo.callback(self._clean)
            self._running, _ = ensure_stack(self._home, request, environ=self._environ)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for launch in self._launches:
            launch.kill()
        self._starter.shutdown()
        self._clean()

    @property
    def stack(self) -> Stack:
        """Where the services are: the agents' sockets, the address of metadata, the dashboard.

        Raises:
            InvalidRequestError: outside of the ``with`` block.
        """
        if self._running is None:
            raise InvalidRequestError("this Cluster does not run: use it in a with block")
        return self._running

    def launch(
        self,
        script: str | os.PathLike[str],
        *arguments: object,
        job: str,
        nodes: Iterable[int] | None = None,
        ranks_per_node: int = 1,
        auto: bool = False,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Launch:
        """Start a script under ``holdfast run`` and return at once.

        Args:
            script: The script's path.
            arguments: Its arguments, as text.
            job: Name of the launch, and of the job under ``auto``; other scripts name their job
                themselves, and have this as ``TORCHELASTIC_RUN_ID``.
            nodes: Numbers of the nodes that take part, from 0; by default all.
            ranks_per_node: Ranks of each.
            auto: The script does not know Holdfast (``--auto``).
            options: More options of ``holdfast run``, such as ``("--max-restarts", "0")``.
            environ: More environment variables of the script.

        Raises:
            InvalidRequestError: there is no such script, no such node, or none at all; an option
                or a variable is no text.
        """
        if not isinstance(job, str):
            raise InvalidRequestError(f"launch: job={job!r} is no text")
        for option in options:
            if not isinstance(option, str):
                raise InvalidRequestError(f"launch: options has {option!r}, which is no text")
        variables = _variables("launch: environ", environ or {})
        if not Path(script).is_file():
            raise InvalidRequestError(f"launch: there is no script {os.fspath(script)}")
        numbers = range(len(self.stack.nodes)) if nodes is None else list(nodes)
        chosen = {number: self.stack.nodes[self._checked(number)] for number in numbers}
        if not chosen:
            raise InvalidRequestError("launch: nodes= names none, so nothing would run")
        folder = self._home / f"launch-{next(self._numbers)}"
        folder.mkdir()
        command = [
            *(sys.executable, "-m", "holdfast.cli.main", "run"),
            *("--nnodes", str(len(chosen)), "--nproc-per-node", str(ranks_per_node)),
            *("--job", job, *(["--auto"] if auto else []), *options),
            *(os.fspath(script), *map(str, arguments)),
        ]
        launch = Launch(
            chosen, command, {**self._environ, **variables}, folder, starter=self._starter
        )
        self._launches.append(launch)
        return launch

    def newest_step(self, job: str) -> int:
        """Return the newest step of a job that is safe, by the catalogue; 0: none is.

        Raises:
            UnavailableError: the metadata service is down.
        """
        path = f"/api/v1/jobs/{urllib.parse.quote(job, safe='')}"
        try:
            return int(rest.ask("GET", self.stack.rest_url.rstrip("/") + path)["newest_step"] or 0)
        except NotFoundError:
            return 0

    def until_safe(self, job: str, step: int, *, timeout_s: float = WAIT_S_MAX) -> int:
        """Wait until ``step`` of a job, or a later one, is safe; return which.

        Raises:
            AssertionError: not within ``timeout_s``; with the end of all logs.
        """
        what = f"step {step} of job {job} to be safe"
        logs = [self.stack.log, *sorted(self._home.glob("launch-*/*.log"))]
        newest = 0

        def safe() -> bool:
            nonlocal newest
            with contextlib.suppress(UnavailableError):  # killed, perhaps: it comes back
                newest = self.newest_step(job)
            return newest >= step

        until(safe, what, timeout_s=timeout_s, logs=logs)
        return newest

    def kill_agent(self, node: int) -> None:
        """Send SIGKILL to a node's agent; it is started again, and finds what it held.

        Raises:
            AssertionError: it was down, and has not come up again in time.
        """
        os.kill(self._agent(node), signal.SIGKILL)

    def kill_metadata(self) -> None:
        """Send SIGKILL to the metadata service; it is started again.

        Raises:
            AssertionError: it was down, and has not come up again in time.
        """
        pid = self._found(lambda: processes.service(self.stack, "metadata"), "metadata")
        os.kill(pid, signal.SIGKILL)

    def lose_node(self, node: int) -> None:
        """Kill launchers, ranks and agent of a node, and take the memory that it held.

        The agent is frozen before: as on a machine that loses power, it sees nothing of it. One
        with empty memory comes up in its place.

        Raises:
            AssertionError: its agent was down, and has not come up again in time.
        """
        lost, agent = self.stack.nodes[self._checked(node)], self._agent(node)
        os.kill(agent, signal.SIGSTOP)
        for launch in self._launches:
            launch.kill_on(node)
        shutil.rmtree(lost.arena, ignore_errors=True)
        os.kill(agent, signal.SIGKILL)

    def _checked(self, number: int) -> int:
        if not 0 <= number < self._nodes_count:
            raise InvalidRequestError(
                f"this Cluster has nodes 0 to {self._nodes_count - 1}, there is no node {number}"
            )
        return number

    def _agent(self, number: int) -> int:
        node = self.stack.nodes[self._checked(number)]
        return self._found(lambda: processes.agent(node), f"the agent of {node.name}")

    def _found(self, look: Callable[[], int | None], what: str) -> int:
        """Return the process that ``look`` finds, now or once it has been started again."""
        pids: list[int] = []

        def up() -> bool:
            pid = look()
            pids[:] = [] if pid is None else [pid]
            return bool(pids)

        until(up, f"{what} to be up", timeout_s=WAIT_S_MAX, logs=[self.stack.log])
        return pids[0]

    def _clean(self) -> None:
        """Stop the services and remove the folder, and what they kept in shared memory."""
        self._running = None
        with contextlib.suppress(NotFoundError):
            stop_stack(self._home)
        erase_stack(self._home, everything=True)
        shutil.rmtree(self._home, ignore_errors=True)


def _variables(what: str, given: Mapping[str, str]) -> Mapping[str, str]:
    for name, text in given.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(f"{what} has {name!r}: {text!r}, where both are to be text")
    return given
