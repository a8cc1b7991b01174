"""Kill this process before or after one storage or RPC operation.

Wraps the functions through which a save touches anything outside the process. Operations count
from ``arm`` on, and have names, "rename closed" or "call Update", as their order varies from run
to run where threads race. The kill is SIGKILL: no handler, no flush, no atexit.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

STORAGE: tuple[tuple[Any, str], ...] = (
    (os, "open"),
    (os, "fdopen"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "link"),
    (os, "mkdir"),
    (os, "ftruncate"),
    (os, "posix_fallocate"),
    (os, "write"),
    (os, "pwrite"),
    (os, "fsync"),
    (fcntl, "lockf"),
)
RPC = ("call", "call_async")
_SESSION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Point:
    """The ``nth`` operation called ``label`` (from 0), and the side of it to die on."""

    label: str
    nth: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.label} #{self.nth}"


Begin = Callable[[tuple[Any, ...]], Point | None]


class Sweep:
    """Counts operations by name; at ``point`` the process dies. Without one it only counts."""

    def __init__(self, point: Point | None = None) -> None:
        self.armed = False
        self.log: list[Point] = []
        self._point = point
        self._seen: Counter[str] = Counter()
        self._guard = threading.Lock()

    def arm(self) -> None:
        """Count from now on."""
        self.armed = True

    def install(self) -> None:
        """Wrap storage and RPC, also where a module holds ``call`` under its own name."""
        from holdfast.rpc import channel

        for owner, name in STORAGE:
            self.wrap(owner, name)
        for name in RPC:
            plain = getattr(channel, name)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is plain:
                    self.wrap(module, name)

    def wrap(self, owner: Any, name: str, label: str = "") -> None:
        """Make ``owner.name`` an operation."""
        inner = getattr(owner, name)

        def begin(args: tuple[Any, ...]) -> Point | None:
            return self.begin(label or describe(name, args))

        if inspect.iscoroutinefunction(inner):
            setattr(owner, name, self._waited(inner, begin))
        else:
            setattr(owner, name, self._called(inner, begin))

    def begin(self, label: str) -> Point | None:
        """Count an operation; die if that is the point. Pass the result to ``end``."""
        if not self.armed:
            return None
        with self._guard:
            reached = Point(label, self._seen[label], after=False)
            self._seen[label] += 1
            self.log.append(reached)
        self._die_at(reached)
        return reached

    def end(self, begun: Point | None) -> None:
        """Say that an operation has ended; die if that is the point."""
        if begun is None:
            return
        reached = replace(begun, after=True)
        if self.armed:
            self.log.append(reached)
        self._die_at(reached)

    def _die_at(self, reached: Point) -> None:
        if reached == self._point:
            os.kill(os.getpid(), signal.SIGKILL)

    def _called(self, inner: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
        @functools.wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Any:
            begun = begin(args)
            try:
                return inner(*args, **kwargs)
            finally:
                self.end(begun)

        return called

    def _waited(self, inner: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
        @functools.wraps(inner)
        async def waited(*args: Any, **kwargs: Any) -> Any:
            begun = begin(args)
            try:
                return await inner(*args, **kwargs)
            finally:
                self.end(begun)

        return waited


def common(logs: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the points that every run has reached, in the order of the first."""
    return [point for point in logs[0] if all(point in log for log in logs)]


def describe(name: str, args: tuple[Any, ...]) -> str:
    """Return what an operation does, the same in every run: no slot, session or pid in it."""
    if name in RPC:
        method = getattr(args[0], "_method", b"?")
        text = method.decode() if isinstance(method, bytes) else str(method)
        return f"call {text.rpartition('/')[2]}"
    if name == "lockf":
        return "unlock" if args[1] & fcntl.LOCK_UN else "lock"
    if name in ("rename", "replace"):
        return f"{name} {_kind(args[0])} to {_kind(args[1])}"
    return f"{name} {_kind(args[0])}" if args and not isinstance(args[0], int) else name


def _kind(path: Any) -> str:
    name = os.fspath(path).rpartition("/")[2]
    if _SESSION.fullmatch(name):
        return "session"
    return ".".join(part for part in name.split(".")[2:]) or "file"
