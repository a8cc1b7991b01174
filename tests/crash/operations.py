"""Kill this process before or after its n-th storage or RPC operation.

Wraps the functions through which a save touches anything outside the process. Armed by ``arm``;
until then operations are not counted. The kill is SIGKILL: no handler, no flush, no atexit.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

from holdfast.rpc import channel

STORAGE: tuple[tuple[Any, str], ...] = (
    (os, "open"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "link"),
    (os, "ftruncate"),
    (os, "posix_fallocate"),
    (os, "write"),
    (os, "pwrite"),
    (os, "fsync"),
    (fcntl, "lockf"),
)
RPC = ("call", "call_async")


class Sweep:
    """Counts operations; at number ``crash_at`` the process dies before or after it."""

    def __init__(self, crash_at: int, *, after: bool) -> None:
        self.armed = False
        self.log: list[str] = []
        self._crash_at = crash_at
        self._after = after

    def arm(self) -> None:
        """Count from now on."""
        self.armed = True

    def install(self, *importers: Any) -> None:
        """Wrap the operations, also where ``importers`` hold them under their own name."""
        for owner, name in STORAGE:
            setattr(owner, name, self._wrap(name, getattr(owner, name)))
        for name in RPC:
            wrapped = self._wrap(name, getattr(channel, name))
            setattr(channel, name, wrapped)
            for module in importers:
                if hasattr(module, name):
                    setattr(module, name, wrapped)

    def _wrap(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(inner):

            @functools.wraps(inner)
            async def waited(*args: Any, **kwargs: Any) -> Any:
                due = self._due(name, args)
                self._die_if(due and not self._after)
                result = await inner(*args, **kwargs)
                self._die_if(due and self._after)
                return result

            return waited

        @functools.wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Any:
            due = self._due(name, args)
            self._die_if(due and not self._after)
            result = inner(*args, **kwargs)
            self._die_if(due and self._after)
            return result

        return called

    def _due(self, name: str, args: tuple[Any, ...]) -> bool:
        if not self.armed:
            return False
        self.log.append(f"{name} {args[0] if args else ''}"[:80])
        return len(self.log) - 1 == self._crash_at

    @staticmethod
    def _die_if(now: bool) -> None:
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
