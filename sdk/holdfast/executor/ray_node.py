"""The Ray actor of a node: has an executor run there for as long as Ray has reserved the node.

The executor is no child of it and outlives it: Ray starts the actor again, and that one finds the
executor by its lock. The other way round the executor knows of the actor by a lock that this one
holds, and ends its jobs when nobody does any more (``holder``): then their GPUs are free for Ray.

It knows nothing of Ray, which makes an actor of it.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from holdfast import locks
from holdfast.core.retry import Waits
from holdfast.embedded import home_folder

LOOK_S = 0.5
START_S_MAX = 60.0
ENDING_S = 10.0
"""So long somebody who has said that it ends, and then no more, is believed to mean it."""
STEADY_S = 60.0
"""An executor that has lived so long did not fail to start."""
TAIL_BYTES = 4096
WAITS = Waits(first_s=0.5, wait_s_max=30.0)
SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
"""For workers; a launcher says better how many threads each rank has."""


class NodeState(TypedDict):
    """What a node's actor says: ``executor`` is its pid, 0: none runs; ``said``: its last line.

    ``over``: it ends, and no executor runs or is on its way.
    """

    host: str
    executor: int
    over: bool
    said: str


class RayNode:
    """Has an executor run from the moment on that it is made; ``say`` tells and asks.

    Args:
        words: Arguments of ``holdfast execute``, but those for the folder and the actor.
        environ: Variables for it that the node has not itself.
        folder: Where the executor keeps its files; empty: in ``HOLDFAST_HOME``.
        hold_s: Seconds without an actor after which an executor ends its jobs.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], folder: str, hold_s: float
    ) -> None:
        self._environ = {**environ, **inherited(os.environ)}
        home = home_folder(self._environ) / "execute" / f"ray-{platform.node()}"
        self._folder = Path(folder) if folder else home
        self._log = self._folder / "executor.log"
        self._held = self._folder / "ray.lock"
        self._lock = -1
        self._command = [
            *(sys.executable, "-m", "holdfast.cli.main", "execute", *words),
            *("--folder", str(self._folder), "--while-held", str(self._held)),
            *("--hold", f"{hold_s:g}s"),
        ]
        self._executor = 0
        self._problem = ""
        self._ending_until_s = 0.0
        self._over = False
        self._news = threading.Event()
        threading.Thread(target=self._run, name="holdfast-ray-node", daemon=True).start()

    def say(self, *, ending: bool) -> NodeState:
        """Return how things are; ``ending``: the executor's jobs are to save and end, then it.

        Of two commands the one that ends counts, while it is heard of.
        """
        if ending:
            self._ending_until_s = time.monotonic() + ENDING_S
            self._news.set()
        return NodeState(
            host=platform.node(),
            executor=self._executor,
            over=self._over,
            said=self._problem or self._last_line(),
        )

    @property
    def _ending(self) -> bool:
        return time.monotonic() < self._ending_until_s

    def _run(self) -> None:
        failures = 0
        while True:
            self._problem = self._hold()
            if self._problem:
                self._over = self._ending
                self._wait(LOOK_S)
                continue
            began_s = time.monotonic()
            pid = locks.holder_of(self._folder / "executor.lock") or self._start()
            self._over = self._ending and not pid
            self._attend(pid)
            steady = time.monotonic() - began_s > STEADY_S
            failures = 0 if steady or self._ending else failures + 1
            self._wait(WAITS.wait_s(failures) if failures else LOOK_S)

    def _hold(self) -> str:
        """Hold the lock by which the executor knows of us; return why that cannot be."""
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._lock < 0:
                self._lock = os.open(self._held, flags, 0o600)
        except OSError as error:
            return f"{self._folder} is of no use: {error}"
        return "" if locks.take(self._lock) else f"another Ray actor has {self._folder}"

    def _start(self) -> int:
        """Return the pid of a new executor; 0: there is none, or none is to be."""
        if self._ending:
            return 0
        self._over = False
        starter = (sys.executable, "-m", "holdfast.executor.detached", str(self._log))
        try:
            done = subprocess.run(  # noqa: S603 - this very Python
                [*starter, *self._command],
                env=self._environ,
                capture_output=True,
                text=True,
                check=True,
                timeout=START_S_MAX,
            )
            return int(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._problem = f"no executor can be started: {error}"
            return 0

    def _attend(self, pid: int) -> None:
        """Return when an executor has ended; tell it to if that is meant."""
        try:
            pidfd = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            return
        if pidfd < 0:
            return
        self._executor = pid
        told = False
        while not select.select([pidfd], [], [], LOOK_S)[0]:
            if self._ending and not told:
                told = True
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGINT)
        os.close(pidfd)
        self._executor = 0

    def _wait(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line for line in lines if line.strip()]
        return said[-1] if said else ""


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Ray worker without those that Ray has made for the worker."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("RAY_") and name not in SET_BY_RAY
    }
