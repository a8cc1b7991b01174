"""The slots this process may write now: leased by the agent, mapped and populated ahead of need.

The watch thread offers what the agent leases; the training thread takes one per save. A slot
that comes back under a new incarnation keeps its mapping.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.session import SlotLease
from holdfast.errors import CheckpointError
from holdfast.snapshot.buffer import SlotBuffer

log = logging.getLogger(__name__)


class SlotPool:
    """Leased slots by plan; each is offered, taken, written, closed, and offered again."""

    def __init__(self, arena: Path) -> None:
        self._arena = arena
        self._buffers: dict[str, SlotBuffer] = {}
        self._ready: dict[str, SlotLease] = {}
        self._seen: dict[str, int] = {}
        self._changed = threading.Condition()

    def offer(self, leases: Sequence[SlotLease]) -> None:
        """Take over the agent's list of open slots: map new ones, let go of those it took back."""
        offered = {lease.slot for lease in leases}
        with self._changed:
            for slot in self._ready.keys() - offered:
                del self._ready[slot]
                self._buffers.pop(slot).drop()
            fresh = [x for x in leases if x.incarnation > self._seen.get(x.slot, -1)]
        for lease in fresh:
            self._map(lease)

    def acquire(self, plan_hash: str, timeout_s: float) -> SlotBuffer | None:
        """Return a slot of this plan, owned by the caller; None when there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(plan_hash) is not None, timeout_s)
            slot = self._find(plan_hash)
            if slot is None:
                return None
            del self._ready[slot]
            return self._buffers[slot]

    def put_back(self, buffer: SlotBuffer) -> None:
        """Return a slot that was taken and not closed: the next save may write it."""
        with self._changed:
            if self._buffers.get(buffer.lease.slot) is buffer:
                self._ready[buffer.lease.slot] = buffer.lease
                self._changed.notify_all()

    def forget(self, buffer: SlotBuffer) -> None:
        """Drop a slot that the agent has taken away from under its writer."""
        with self._changed:
            if self._buffers.get(buffer.lease.slot) is buffer:
                del self._buffers[buffer.lease.slot]
        buffer.drop()

    def reset(self) -> None:
        """Drop every slot that is not being written: another plan, or the end."""
        with self._changed:
            for slot in list(self._ready):
                del self._ready[slot]
                self._buffers.pop(slot).drop()

    def _find(self, plan_hash: str) -> str | None:
        matching = (s for s, lease in self._ready.items() if lease.plan_hash == plan_hash)
        return next(matching, None)

    def _map(self, lease: SlotLease) -> None:
        """Open or reuse the slot's mapping; slow for a new one, so outside the lock."""
        known = self._buffers.get(lease.slot)
        try:
            if known is not None and known.reuse(lease):
                buffer = known
            else:
                buffer = SlotBuffer.open(self._arena, lease)
                if known is not None:
                    known.drop()
        except (CheckpointError, OSError) as error:
            log.warning("slot %s cannot be written: %s", lease.slot, error)
            return
        with self._changed:
            self._seen[lease.slot] = lease.incarnation
            self._buffers[lease.slot] = buffer
            self._ready[lease.slot] = lease
            self._changed.notify_all()
