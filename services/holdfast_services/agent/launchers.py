"""The launchers of this node: their way to metadata, and the news of their end.

A launcher holds the lock of a file in ``<arena>/sessions``, as ranks do. The process that holds it
is watched by its pidfd, so that a killed one is told of at once and not when its lease runs out.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace

from holdfast.core.ids import session_id
from holdfast.core.retry import Waits
from holdfast.core.rounds import LauncherReport, LaunchRequest, LaunchView
from holdfast.errors import CheckpointError, PreconditionError
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import MetadataClient

GONE_WAITS = Waits(first_s=0.1, wait_s_max=1.0, tries_max=8)

log = logging.getLogger(__name__)


class Launchers:
    """Passes reports on as they came, with the name of this node; ``close`` after.

    Args:
        node: The name of this node.
        address: Host at which other nodes reach it.
        arena: Where launchers hold their locks.
        metadata: The way to the catalogue.
    """

    def __init__(self, node: str, address: str, arena: Arena, metadata: MetadataClient) -> None:
        self._node = node
        self._address = address
        self._arena = arena
        self._metadata = metadata
        self._watched: dict[str, int] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def ask(self, request: LaunchRequest) -> LaunchView:
        """Return what metadata answers.

        Raises:
            PreconditionError: no process holds the launcher's lock: its death could not be seen.
            CheckpointError: metadata refuses the launcher, or does not answer.
        """
        launcher = session_id(request.report.launcher)
        holder = self._arena.session_holder(launcher)
        if holder is None:
            raise PreconditionError(f"launcher {launcher} holds no lock in {self._arena.folder}")
        if launcher not in self._watched and holder:
            self._watch(request.report, holder)
        return await self._metadata.launch(self._named(request))

    def close(self) -> None:
        """Watch nobody any more."""
        for task in self._telling:
            task.cancel()
        for launcher in list(self._watched):
            self._unwatch(launcher)

    def _watch(self, report: LauncherReport, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as error:  # it ends just now, or is of another namespace: its lease tells
            log.debug("launcher %s cannot be watched: %s", report.launcher, error)
            return
        self._watched[report.launcher] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, report)

    def _ended(self, report: LauncherReport) -> None:
        self._unwatch(report.launcher)
        self._arena.forget_session(report.launcher)
        telling = asyncio.get_running_loop().create_task(self._tell(report))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self, report: LauncherReport) -> None:
        request = self._named(LaunchRequest(report=report, gone=True))
        for wait_s in GONE_WAITS:
            try:
                await self._metadata.launch(request)
            except CheckpointError as error:
                if not error.retryable:
                    break
                await asyncio.sleep(wait_s)
            else:
                return
        log.info("launcher %s has ended; metadata hears it by its lease", report.launcher)

    def _unwatch(self, launcher: str) -> None:
        descriptor = self._watched.pop(launcher)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _named(self, request: LaunchRequest) -> LaunchRequest:
        address = request.report.address or self._address
        return replace(request, node=self._node, address=address)
