"""Runs the stack in the background, and tells the one who asked how that went."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

READY = "ready"
READY_S_MAX = 90.0
NEWS_BYTES_MAX = 4096

Tell = Callable[[str], None]


def detached(run: Callable[[Tell], int], *, output: Path) -> str:
    """Run ``run`` in a child with a session of its own; return the first news it tells.

    Args:
        run: Told how to tell; the child ends with its exit code.
        output: File that receives what the child writes to standard output and error.

    Returns:
        The news, or why there is none; then the child is asked to end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _leave_terminal(output)
        os._exit(run(_telling(writing)))
    os.close(writing)
    news = _hear(reading)
    os.close(reading)
    if not news:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
    return news or f"did not become ready; see {output}"


def _leave_terminal(output: Path) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nowhere, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)


def _telling(pipe: int) -> Tell:
    """Return a function that tells once; the end of the child closes the pipe anyway."""
    pipes = [pipe]

    def tell(news: str) -> None:
        if pipes:
            end = pipes.pop()
            with suppress(BrokenPipeError):
                os.write(end, news.encode()[:NEWS_BYTES_MAX])
            os.close(end)

    return tell


def _hear(pipe: int) -> str:
    """Return what came through ``pipe`` until its end; empty after ``READY_S_MAX``."""
    deadline_s = time.monotonic() + READY_S_MAX
    heard = b""
    while select.select([pipe], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
        data = os.read(pipe, NEWS_BYTES_MAX)
        if not data:
            return heard.decode(errors="replace")
        heard += data
    return ""
