"""The view of each node as it is sent: made once for all who ask together, written once.

All that one change wakes ask for views of one snapshot, a node's report and its watch for the same
one, and most changes are nothing to most nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace

from holdfast.core.node_view import NodeView
from holdfast.rpc.codec import to_message
from holdfast.v1 import metadata_pb2 as pb
from holdfast_services.metadata.domain.node_view import World, node_view
from holdfast_services.metadata.transactor import Transactor

KEPT_BYTES_MAX = 32 << 10
"""A longer view is written each time: those of many nodes, of which each lists all others, would
take more memory than it is worth."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What a node was told last, without the number of its inventory, and as a message."""

    view: NodeView
    message: pb.NodeView


class Views:
    """Makes views for one process. Who asks shares the messages and does not change them."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._world: World | None = None
        self._making: dict[str, asyncio.Task[pb.NodeView]] = {}
        self._written: dict[str, _Written] = {}

    async def of(self, node: str, since_s: float | None = None) -> pb.NodeView:
        """Return a node's view, of a snapshot as ``Transactor.world`` gives it.

        Raises:
            UnavailableError: the database does not answer.
        """
        world = await self._transactor.world(since_s)
        if world is not self._world:
            self._world, self._making = world, {}
            self._written = {n: kept for n, kept in self._written.items() if n in world.nodes}
        making, task = self._making, self._making.get(node)
        if task is None:
            task = making[node] = asyncio.create_task(self._make(world, node))
            task.add_done_callback(lambda _: making.pop(node, None))
        return await asyncio.shield(task)

    async def _make(self, world: World, node: str) -> pb.NodeView:
        before = self._written.get(node)
        written, message = await self._transactor.in_thread(lambda: _write(world, node, before))
        if node in world.nodes and written.message.ByteSize() <= KEPT_BYTES_MAX:
            self._written[node] = written
        else:
            self._written.pop(node, None)
        return message


def _write(world: World, node: str, before: _Written | None) -> tuple[_Written, pb.NodeView]:
    view = node_view(world, node)
    # Which inventory it knows changes with each heartbeat, and is nothing to act on.
    what = replace(view, taken_incarnation=0, taken_sequence=0)
    if before is not None and before.view == what:
        written = before
    else:
        written = _Written(what, versioned(what))
    message = pb.NodeView()
    message.CopyFrom(written.message)
    message.taken_incarnation = view.taken_incarnation
    message.taken_sequence = view.taken_sequence
    return written, message


def versioned(view: NodeView) -> pb.NodeView:
    """Return a view as a message whose version follows from what it says, in any process."""
    message = to_message(view, pb.NodeView)
    body = message.SerializeToString(deterministic=True)
    message.version = hashlib.blake2b(body, digest_size=8).hexdigest()
    return message
