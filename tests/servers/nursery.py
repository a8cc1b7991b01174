"""Forks ranks: imports torch once, all of it, so that a process that needs it starts at once.

``python -m tests.servers.nursery`` reads one JSON command a line and answers each. It makes no
thread and no gRPC object, so that it may fork; a rank is a process of its own, with the
environment, arguments and exit code of one that was started from nothing. At its end it waits for
its threads and runs what is registered for exits, but does not take all of torch apart, which
costs twice what the rank did; ``test_run`` has ranks that do. When its input ends, the nursery
kills its ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
QUICK = Path(__file__).with_name("quick")
"""First in ``PYTHONPATH`` it makes torch cheap for processes that are started from nothing."""
POLL_S = 0.02


class Nursery:
    """The nursery's process, as tests hold it: a module, its words, and more of its environment."""

    def __init__(self, module: str, *words: str, **environ: str) -> None:
        self._command = (sys.executable, "-m", module, *words)
        self._environ = environ
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, script: Path, *arguments: str, env: Mapping[str, str], log: Path) -> Child:
        """Run ``script`` in a process of its own; what it says goes to ``log``."""
        log.touch()  # who reads it may be faster than the fork
        command = {"script": str(script), "arguments": arguments, "env": dict(env)}
        return Child(self, self.ask(**command, log=str(log)))

    def together(
        self,
        script: Path,
        arguments: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str],
        folder: Path,
        timeout_s: float,
    ) -> None:
        """Run ``script`` once for each list of arguments, side by side; none outlives the call.

        Raises:
            AssertionError: not all ended well; with what they said, each in a log in ``folder``.
        """
        logs = [folder / f"{number}.log" for number in range(len(arguments))]
        started = [
            self.start(script, *given, env=env, log=log)
            for given, log in zip(arguments, logs, strict=True)
        ]
        try:
            codes = {process.wait(timeout_s) for process in started}
        finally:
            for process in started:
                process.kill()
        assert codes == {0}, [log.read_text() for log in logs]

    def ask(self, **command: Any) -> Any:
        """Return the nursery's answer."""
        with self._one_at_a_time:
            process = self._process or self._begin()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

    def _begin(self) -> subprocess.Popen[str]:
        paths = (str(ROOT), str(ROOT / "sdk"), str(ROOT / "services"))
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0", **self._environ,
            },
        )  # fmt: skip
        return self._process


class Child:
    """A process that the nursery forked, as ``subprocess`` would have it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Return how it ended.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout_s)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.send_signal(signal.SIGKILL)


NURSERY = Nursery("tests.servers.nursery")
"""One for all tests of a process; it begins with the first rank and ends with that process."""


def live(script: str, arguments: list[str], env: dict[str, str], log: str) -> NoReturn:
    """Be a fresh process that runs ``script``."""
    redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    end(run(script))


def redirect(out: int) -> None:
    """Have ``out`` for standard output and error, and nothing to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(out)


def run(script: str) -> int:
    """Run a script, say what it raises; return the exit code that the interpreter gives then."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()  # as the interpreter does before it says anything of it
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except Exception as error:
        # What runs at exits tells a failure by these.
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__
        sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End as the interpreter does, all but the objects, which go with the process."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(pid: int) -> int | None:
    """Return how a child ended, as ``subprocess`` says it; None while it lives."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def attend(word: str, live: Callable[..., NoReturn]) -> NoReturn:
    """Fork and ask until the input ends: a command with ``word`` is lived, in a child."""
    gc.freeze()  # a rank's search for garbage would copy all pages with objects
    running: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        if word not in command:
            answer = ended(command["pid"])
            running -= {command["pid"]} if answer is not None else set()
        elif (answer := os.fork()) == 0:
            live(**command)
        else:
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end(0)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401 - an optimizer's first step wants it, a second of import

    import holdfast.checkpointer  # noqa: F401

    attend("script", live)
