"""Agents report and hear: many inventories in one transaction, one snapshot for all answers.

Views leave as messages, see ``views``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.ids import node_name
from holdfast.core.inventory import Inventory
from holdfast.core.retry import bounded
from holdfast.core.user_events import Event
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.metadata.calls.batch import Batch
from holdfast_services.metadata.calls.views import Views
from holdfast_services.metadata.domain.inventory_limits import received
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import agents

WATCH_POLL_S = 1.0
WATCH_S_MAX = 60.0
TRANSPORT_LEFT = "transport_left"
"""An agent's event: a fetch went over another transport than the first that both sides have."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Answer to a report: what its incarnation must exceed, and when its transaction was over."""

    incarnation_min: int
    since_s: float


class Reports:
    """Takes inventories and answers with views. Owns no thread; counts for the figures."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._batch: Batch[Inventory, Taken] = Batch(self._take)
        self._views = Views(transactor)
        self.count = 0
        self.s_sum = 0.0
        self.transports_left_count = 0

    async def report(self, inventory: Inventory) -> pb.NodeView:
        """Take a node's inventory and return what the node should know; idempotent.

        Raises:
            InvalidRequestError: names or numbers that make no sense.
            UnavailableError: the database does not answer, or too many reports wait.
        """
        inventory = received(inventory)
        began_s = time.monotonic()
        taken = await self._batch.ask(inventory)
        view = await self._views.of(inventory.node.node, taken.since_s)
        self.count += 1
        self.s_sum += time.monotonic() - began_s
        return _refused(view, taken.incarnation_min) if taken.incarnation_min else view

    def count_events(self, events: Sequence[Event]) -> None:
        """Count what the figures tell of the news of agents."""
        self.transports_left_count += sum(event.kind == TRANSPORT_LEFT for event in events)

    async def watch(self, node: str, version: str, wait_s: float) -> pb.NodeView:
        """Return the node's view once its version is not ``version``, or after ``wait_s``."""
        node_name(node)
        ends_s = time.monotonic() + bounded(wait_s, WATCH_S_MAX)
        since_s = None
        while True:
            heard = self._transactor.listen()
            view = await self._views.of(node, since_s)
            left_s = ends_s - time.monotonic()
            if view.version != version or left_s <= 0:
                return view
            since_s = await self._transactor.changed(min(left_s, WATCH_POLL_S), heard)

    async def _take(self, inventories: Sequence[Inventory]) -> Sequence[Taken]:
        limits = self._transactor.limits
        answers, told = await self._transactor.write(
            lambda c: agents.report(c, inventories, limits)
        )
        since_s = asyncio.get_running_loop().time()
        if told is not None:
            self._transactor.tell(told)
        return [Taken(incarnation_min, since_s) for incarnation_min in answers]


def _refused(view: pb.NodeView, incarnation_min: int) -> pb.NodeView:
    message = pb.NodeView()
    message.CopyFrom(view)  # who watches has the same one
    message.incarnation_min = incarnation_min
    return message
