"""The processes of a node's ranks: started, told what to be, killed as groups.

Each is the leader of a session of its own, so that what it starts goes with it. Make them on the
launcher's main thread: the kernel kills them when the thread that started them ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.last_step import NONE, VARIABLE, LastStep
from holdfast.launcher.keeper import MARK, kill, marked
from holdfast.launcher.outputs import Output

PROGRAM = Path(__file__).with_name("rank_process.py")
KEEPER = Path(__file__).with_name("keeper.py")
OUTPUT_S_MAX = 2.0
STDOUT, STDERR = 1, 2
NAMES = {STDOUT: "out", STDERR: "err"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What every rank runs, and where its output goes."""

    words: tuple[str, ...]
    module: bool
    redirects: int = 0
    tee: int = 0
    auto: Mapping[str, object] | None = None
    warm_cuda: bool = False


class Keeper:
    """The process that ends all that is left if this one is killed."""

    def __init__(self) -> None:
        self._kept: dict[int, str] = {}
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-I", "-S", str(KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def keep(self, process: RankProcess) -> None:
        """Have it end a process and what that starts."""
        self._kept[process.pid] = process.mark
        self._say(f"+{process.pid} {process.mark}\n")

    def forget(self, process: RankProcess) -> None:
        """Have it forget a process, which has ended."""
        del self._kept[process.pid]
        self._say(f"-{process.pid}\n")

    def renew(self) -> None:
        """Start it again: somebody has killed it."""
        self._end()
        self._start()
        for pid, mark in self._kept.items():
            self._say(f"+{pid} {mark}\n")

    def close(self) -> None:
        """End it, and what it still keeps."""
        self._end()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: ``renew`` says it again
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        os.close(self.pidfd)


class RankProcess:
    """One process: a standby until ``go``, then a rank. ``pidfd`` is readable once it has ended.

    ``last_step`` is what it had completed by then, -1: none, or it has not ended.

    Raises:
        OSError: the kernel has no process or no memory for it.
    """

    def __init__(
        self,
        command: Command,
        local_rank: int,
        environ: Mapping[str, str],
        preload: Sequence[str],
        keeper: Keeper,
        tell: Callable[[str], None],
    ) -> None:
        self.local_rank = local_rank
        self.mark = secrets.token_hex(8)
        self._keeper = keeper
        self._redirects = command.redirects
        self._outputs = {
            number: Output(number, f"[default{local_rank}]:", tell)
            for number in NAMES
            if command.tee & number
        }
        self.last_step = NONE
        self._steps = LastStep()
        ours, theirs = socket.socketpair()
        order = {
            "parent": os.getpid(),
            "descriptor": theirs.fileno(),
            "preload": list(preload),
            "module": command.module,
            "auto": command.auto,
            "warm_cuda": command.warm_cuda and bool(preload),
        }
        ends = {number: output.write_end for number, output in self._outputs.items()}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user's script in our interpreter
                [sys.executable, "-u", str(PROGRAM), json.dumps(order), *command.words],
                env={
                    **environ,
                    MARK: marked(environ, self.mark),
                    VARIABLE: str(self._steps.descriptor),
                },
                pass_fds=(theirs.fileno(), self._steps.descriptor),
                stdout=ends.get(STDOUT),
                stderr=ends.get(STDERR),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            self._steps.close()
            raise
        finally:
            theirs.close()
            for write_end in ends.values():
                os.close(write_end)
        self._channel = ours
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        keeper.keep(self)

    def go(self, environ: Mapping[str, str], failure_file: Path, logs: Path | None) -> None:
        """Have it become a rank; ``logs`` is where its output goes, without the ending."""
        files = {}
        for number, name in NAMES.items():
            path = logs.with_name(f"{logs.name}.{name}") if logs else None
            if path and number in self._outputs:
                self._outputs[number].keep(path)
            elif path and self._redirects & number:
                files[str(number)] = str(path)
        told: dict[str, Any] = {
            "environ": dict(environ),
            "failure_file": str(failure_file),
            "files": files,
        }
        with contextlib.suppress(OSError):  # it has ended: its pidfd says so
            self._channel.sendall(json.dumps(told).encode() + b"\n")
        self._channel.close()

    @property
    def channel(self) -> int:
        """Readable once a standby is warm: all is imported; -1: it is a rank by now."""
        return self._channel.fileno()

    def is_warm(self) -> bool:
        """Tell what it says on its channel: that it is warm; False: it has ended."""
        try:
            return self._channel.recv(1) != b""
        except OSError:
            return False

    def counts_steps(self) -> bool:
        """Tell whether it has told Holdfast of a step; only until it is reaped."""
        return self._steps.read() != NONE

    def signal(self, number: int) -> None:
        """Send the rank itself a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _reap(self) -> int:
        code = self._process.wait()
        self.last_step = self._steps.close()
        os.close(self.pidfd)
        self._channel.close()
        self._keeper.forget(self)
        for output in self._outputs.values():
            output.finish(OUTPUT_S_MAX)
        return code


def end(processes: Sequence[RankProcess]) -> list[int]:
    """Kill processes and all that they have started, wait; return exit codes, minus a signal's.

    All are killed before the first is waited for, and before it is reaped: until then no other
    group can have its number.
    """
    if processes:
        kill({process.pid: process.mark for process in processes})
    return [process._reap() for process in processes]  # noqa: SLF001 - of this module
