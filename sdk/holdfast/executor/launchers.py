"""The launchers of this node as processes: started, adopted, told to end, killed, read.

::

    FOLDER/executor.lock  identity.json
    FOLDER/launches/<job, quoted>.<start>/ending.json      until nobody asks any more
    FOLDER/logs/<job, quoted>.<start>.log                  the newest LOGS_KEPT_COUNT

They live on when this process ends, and the next one finds them by their command line, which names
a file that no other process names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.executions import LastWord, LaunchState, Order, Outcome
from holdfast.executor.decision import Key, Known
from holdfast.launcher import ending

LOGS_KEPT_COUNT = 200
LOG_TAIL_BYTES = 2_000
USAGE_CODE = 2
"""What a command line that argparse refuses ends with."""


@dataclass(slots=True)
class _Process:
    """One launcher: its pidfd while it lives, how it ended once it has."""

    known: Known
    pidfd: int
    state: LaunchState


class Launchers:
    """All launchers of a node; ``close`` leaves them running.

    Args:
        folder: Where their files are; nobody else's, see ``identity``.
        environ: What each inherits, ``HOLDFAST_AGENT`` among it.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._launches = folder / "launches"
        self._logs = folder / "logs"
        self._launches.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._environ = environ
        self._processes: dict[Key, _Process] = {}
        self._children: dict[Key, subprocess.Popen[bytes]] = {}
        self._adopt()

    @property
    def known(self) -> dict[Key, Known]:
        """All that were started and not forgotten."""
        return {key: process.known for key, process in self._processes.items()}

    @property
    def states(self) -> tuple[LaunchState, ...]:
        """What to report of them."""
        return tuple(process.state for _, process in sorted(self._processes.items()))

    @property
    def pidfds(self) -> dict[int, Key]:
        """Descriptors that become readable when a launcher ends."""
        return {p.pidfd: key for key, p in self._processes.items() if p.pidfd >= 0}

    def start(self, order: Order) -> None:
        """Start the launcher of an order; one that cannot be is reported as refused."""
        key = (order.job, order.start)
        folder = self._launches / _quoted(key)
        state = LaunchState(job=order.job, start=order.start)
        process = _Process(Known(alive=True, grace_s=order.grace_s), -1, state)
        self._processes[key] = process
        try:
            folder.mkdir(mode=0o700)
            with self._log(key).open("ab") as log:
                child = subprocess.Popen(  # noqa: S603 - what the user has submitted
                    _command(order, folder / "ending.json"),
                    cwd=order.folder or None,
                    env={**self._environ, **order.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            reason = f"the launcher cannot be started: {error.strerror}{where}"
            ending.write(folder / "ending.json", LastWord(outcome=Outcome.REFUSED, reason=reason))
            self._set_ended(process, LastWord(outcome=Outcome.REFUSED, code=1, reason=reason))
            return
        self._children[key] = child
        process.pidfd = os.pidfd_open(child.pid)
        self._prune_logs()

    def stop(self, key: Key) -> None:
        """Tell a launcher to save and end."""
        process = self._processes[key]
        process.known = replace(process.known, stopped_at_s=time.monotonic())
        self._signal(process, signal.SIGTERM)

    def kill(self, key: Key) -> None:
        """End a launcher."""
        process = self._processes[key]
        process.known = replace(process.known, killed=True)
        self._signal(process, signal.SIGKILL)

    def forget(self, key: Key) -> None:
        """Remove what is known of a launcher that has ended; its log stays."""
        del self._processes[key]
        shutil.rmtree(self._launches / _quoted(key), ignore_errors=True)

    def note_ended(self, key: Key) -> None:
        """Take in how a launcher has ended, of which the pidfd says so."""
        process = self._processes[key]
        child = self._children.pop(key, None)
        code = child.wait() if child is not None else None
        os.close(process.pidfd)
        process.pidfd = -1
        self._set_ended(process, self._last_word(key, code))

    def close(self) -> None:
        """Let go of them: they train on."""
        for process in self._processes.values():
            if process.pidfd >= 0:
                os.close(process.pidfd)
        for child in self._children.values():
            child.returncode = 0  # nobody waits for it any more, which is meant
        self._processes.clear()

    def _signal(self, process: _Process, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, number)

    def _set_ended(self, process: _Process, word: LastWord) -> None:
        process.known = replace(process.known, alive=False)
        process.state = replace(
            process.state, outcome=word.outcome, code=word.code, reason=word.reason
        )

    def _last_word(self, key: Key, code: int | None) -> LastWord:
        """Return how a launcher has ended; one that left no word was killed, or never began."""
        word = ending.read(self._launches / _quoted(key) / "ending.json")
        if word is not None:
            return word
        if code == USAGE_CODE:
            return LastWord(outcome=Outcome.REFUSED, code=code, reason=self._tail(key))
        how = f"by signal {-code}" if code is not None and code < 0 else "without a word"
        tail = self._tail(key)
        reason = f"its launcher has ended {how}" + (f": {tail}" if tail else "")
        return LastWord(outcome=Outcome.KILLED, code=code or 0, reason=reason)

    def _tail(self, key: Key) -> str:
        try:
            data = self._log(key).read_bytes()[-LOG_TAIL_BYTES:]
        except OSError:
            return ""
        return data.decode(errors="replace").replace("\0", "").strip()

    def _log(self, key: Key) -> Path:
        return self._logs / f"{_quoted(key)}.log"

    def _prune_logs(self) -> None:
        logs = sorted(self._logs.glob("*.log"), key=lambda path: path.stat().st_mtime_ns)
        kept = {f"{_quoted(key)}.log" for key in self._processes}
        for path in logs[:-LOGS_KEPT_COUNT]:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _adopt(self) -> None:
        """Find the launchers that a process before this one has started."""
        folders = [folder for folder in self._launches.iterdir() if folder.is_dir()]
        running = _running() if folders else {}
        for folder in sorted(folders):
            key = _key(folder.name)
            if key is None:
                continue
            pidfd = _opened(running.get(str(folder / "ending.json"), 0))
            state = LaunchState(job=key[0], start=key[1])
            process = _Process(Known(alive=pidfd >= 0, grace_s=30.0), pidfd, state)
            self._processes[key] = process
            if pidfd < 0:
                self._set_ended(process, self._last_word(key, None))


def _command(order: Order, ending_file: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "holdfast.cli.main", "run", "--ending", str(ending_file)),
        *("--allocated", "--job", order.job, "--nnodes", f"1:{order.nodes_max}"),
        *("--nproc-per-node", str(order.gpus), "--grace", f"{order.grace_s:g}"),
        *order.command,
    ]


def _quoted(key: Key) -> str:
    """Return the name of a launcher's folder: no name from outside becomes a path unchecked."""
    return f"{urllib.parse.quote(key[0], safe='')}.{key[1]}"


def _key(name: str) -> Key | None:
    job, dot, start = name.rpartition(".")
    return (urllib.parse.unquote(job), int(start)) if dot and start.isdecimal() else None


def _running() -> dict[str, int]:
    """Return the pids of all launchers by the file in which they will leave word."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            path = words[words.index(b"--ending") + 1]
            found[os.fsdecode(path)] = int(folder.name)
    return found


def _opened(pid: int) -> int:
    """Return a pidfd; -1 if the process has gone."""
    if not pid:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
