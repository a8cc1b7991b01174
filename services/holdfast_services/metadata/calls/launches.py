"""Launchers report and hear of rounds: many reports in one decision, one read for all who wait."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from holdfast.core import allocations
from holdfast.core import rounds as said
from holdfast.core.allocations import Allocation
from holdfast.core.ids import node_name
from holdfast.core.retry import bounded
from holdfast.core.rounds import LaunchRequest, LaunchView
from holdfast.errors import CheckpointError
from holdfast.rpc.codec import to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.metadata.calls.batch import Batch
from holdfast_services.metadata.domain import round_view
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import launches

WATCH_POLL_S = 1.0
"""Another metadata process may have changed a launch: nobody tells this one."""


class Launches:
    """Takes reports and answers with views. Owns no thread."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._batch: Batch[LaunchRequest, Launch] = Batch(self._hear)
        self._reading: dict[str, tuple[asyncio.Event, asyncio.Task[Launch]]] = {}

    async def ask(self, request: LaunchRequest) -> LaunchView:
        """Take a report; return the launcher's view once it differs, or after ``wait_s``.

        Raises:
            InvalidRequestError: names or numbers that make no sense.
            AlreadyExistsError: the job's name, or the node, belongs to another; names the holder.
            UnavailableError: try again.
        """
        said.check(request.report)
        node_name(request.node)
        wait_s_max = self._transactor.limits.node_lease_s / round_view.POLLS_PER_LEASE
        ends_s = time.monotonic() + bounded(request.wait_s, wait_s_max)
        heard = self._transactor.listen()
        launch = await self._batch.ask(request)
        while True:
            view = self._view(launch, request.report.launcher)
            left_s = ends_s - time.monotonic()
            if view.version != request.version or left_s <= 0:
                return view
            await self._transactor.changed(min(left_s, WATCH_POLL_S), heard)
            heard = self._transactor.listen()
            launch = await self._read(request.report.job, heard)

    async def allocate(self, job: str, allocation: Allocation) -> None:
        """Have the rounds of a job's launch be of an allocation.

        Raises:
            InvalidRequestError: names or numbers that make no sense.
            StaleGenerationError: the launch has a newer one.
            UnavailableError: try again.
        """
        allocations.check(allocation)
        limits = self._transactor.limits
        if await self._transactor.write(lambda c: launches.allocate(c, job, allocation, limits)):
            self._transactor.tell()

    async def _hear(self, requests: Sequence[LaunchRequest]) -> Sequence[Launch | CheckpointError]:
        limits = self._transactor.limits
        answers, changed = await self._transactor.write(
            lambda c: launches.hear(c, requests, limits)
        )
        if changed:
            self._transactor.tell()
        return answers

    async def _read(self, job: str, heard: asyncio.Event) -> Launch:
        """Return the launch as read after the last change: once for all whom that has woken."""
        since, reading = self._reading.get(job, (None, None))
        if reading is None or since is not heard:
            reading = asyncio.create_task(self._transactor.read(lambda c: c.launch(job)))
            self._reading[job] = heard, reading
            reading.add_done_callback(lambda done: self._forget(job, done))
        return await asyncio.shield(reading)

    def _forget(self, job: str, done: asyncio.Task[Launch]) -> None:
        if self._reading.get(job, (None, None))[1] is done:
            del self._reading[job]

    def _view(self, launch: Launch, launcher: str) -> LaunchView:
        view = round_view.view(launch, launcher, lease_s=self._transactor.limits.node_lease_s)
        body = to_message(view, pb.LaunchView).SerializeToString(deterministic=True)
        return replace(view, version=hashlib.blake2b(body, digest_size=8).hexdigest())
