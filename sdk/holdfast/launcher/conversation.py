"""A launcher's conversation with its node's agent: one thread, one call at a time.

The call brings the newest report and waits for another view. News of ours cancel it and begin the
next, so they are told at once; nothing is lost by that, as report and view are levels.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from holdfast import locks
from holdfast.core.retry import Waits
from holdfast.core.rounds import LauncherReport, LaunchRequest, LaunchView
from holdfast.errors import CheckpointError, PreconditionError, UnavailableError
from holdfast.rpc.channel import begin, call, sync_channel, unix_target
from holdfast.rpc.codec import from_message, to_message
from holdfast.rpc.status import from_rpc_error
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import metadata_pb2
from holdfast.v1.agent_pb2_grpc import AgentStub

CALL_S_MAX = 10.0
LEAVE_S_MAX = 2.0
RETRY_WAITS = Waits(first_s=0.1, wait_s_max=1.0)

log = logging.getLogger(__name__)


class Conversation:
    """Keeps metadata informed by way of the agent at ``path``; ``start``, ``say``, ``leave``.

    Args:
        path: The agent's unix socket.
        report: The first report; ``say`` changes it. Its launcher id is made here.
        on_view: Runs on the thread with each view that differs.
        on_error: Runs on the thread with each error; the call is made again.
    """

    def __init__(
        self,
        path: Path,
        report: LauncherReport,
        on_view: Callable[[LaunchView], None],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        self._channel = sync_channel(unix_target(path))
        self._stub = AgentStub(self._channel)
        self._on_view = on_view
        self._on_error = on_error
        self._guard = threading.Lock()
        self._report = report
        self._view = LaunchView()
        self._call: Any = None
        self._news = threading.Event()
        self._stopping = False
        self._lock_descriptor = -1
        self._thread = threading.Thread(target=self._run, name="holdfast-launcher", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def say(self, change: Callable[[LauncherReport], LauncherReport]) -> None:
        """Change the report; it is on its way when this returns."""
        with self._guard:
            changed = change(self._report)
            self._report = replace(changed, sequence=self._report.sequence + 1)
            self._news.set()
            if self._call is not None:
                self._call.cancel()

    def leave(self) -> None:
        """Say that this launcher ends, if anybody hears it, and close."""
        self._stopping = True
        self.say(lambda report: replace(report, left=True))
        self._thread.join(LEAVE_S_MAX)
        request = LaunchRequest(report=self._report)
        try:
            self._ask(request, LEAVE_S_MAX).result()
        except (CheckpointError, grpc.RpcError, grpc.FutureCancelledError) as error:
            log.debug("nobody heard that this launcher ends: %s", error)
        self._channel.close()
        self._unlock()

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                view = self._next()
                failures = 0
            except CheckpointError as error:
                failures += 1
                self._view = replace(self._view, version="")
                self._on_error(self._locked_elsewhere(error))
                self._news.wait(RETRY_WAITS.wait_s(failures))
                continue
            if view is not None and view.version != self._view.version:
                self._view = view
                self._on_view(view)

    def _locked_elsewhere(self, error: CheckpointError) -> CheckpointError:
        """Lock anew if the agent does not see our lock: its arena may be another one by now."""
        if not isinstance(error, PreconditionError):
            return error
        self._unlock()
        return UnavailableError(f"its agent does not see that it runs: {error.message}")

    def _unlock(self) -> None:
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _next(self) -> LaunchView | None:
        """Ask once; None: there was news meanwhile."""
        if self._lock_descriptor < 0:
            self._lock_descriptor = self._locked()
        with self._guard:
            self._news.clear()
            view = self._view
            request = LaunchRequest(report=self._report, version=view.version, wait_s=view.poll_s)
            asked = self._call = self._ask(request, view.poll_s + CALL_S_MAX)
        try:
            answer = asked.result()
        except grpc.FutureCancelledError:
            return None
        except grpc.RpcError as cause:
            if self._news.is_set():
                return None
            raise from_rpc_error(cause) from cause
        finally:
            with self._guard:
                self._call = None
        return from_message(answer, LaunchView)

    def _ask(self, request: LaunchRequest, timeout_s: float) -> Any:
        message = to_message(request, metadata_pb2.LaunchRequest)
        return begin(self._stub.Launch, message, timeout_s=timeout_s)

    def _locked(self) -> int:
        """Take the lock by which the agent sees this process end; return its descriptor."""
        described = call(self._stub.Describe, pb.DescribeRequest(), timeout_s=CALL_S_MAX)
        path = Path(described.arena) / "sessions" / self._report.launcher
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        except OSError as cause:
            raise UnavailableError(f"{path} cannot be made: {cause.strerror}") from cause
        if not locks.take(descriptor):
            os.close(descriptor)
            raise UnavailableError(f"{path} is locked by another process")
        return descriptor


def new_launcher_id() -> str:
    """Return a name that no other launcher has."""
    return secrets.token_hex(16)
