"""The slots this process may write now: leased by the agent, mapped and populated ahead of need.

The watch thread offers what the agent leases; the training thread takes one per save. A slot
that comes back under a new incarnation keeps its mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.copying.port import Device
from holdfast.core.session import SlotLease
from holdfast.errors import CheckpointError, NotFoundError, PreconditionError
from holdfast.logs import steady_logger
from holdfast.snapshot.buffer import SlotBuffer

log = steady_logger(__name__)


class SlotPool:
    """Leased slots by plan; each is offered, taken, written, closed, and offered again.

    Invariants: a slot is *ready* (mapped, locked, not taken), *taken* by one save, or neither
    (closed: its mapping waits for the next lease). An incarnation is mapped once. While a slot is
    being mapped its buffer belongs to who maps it; ``_mapping`` says whether it is still wanted.
    ``on_refusal`` is told why a driver does not register a slot; it is used all the same.
    """

    def __init__(
        self, arena: Path, on_refusal: Callable[[str], None] = lambda _reason: None
    ) -> None:
        self._arena = arena
        self._on_refusal = on_refusal
        self._device: Device | None = None
        self._buffers: dict[str, SlotBuffer] = {}
        self._leases: dict[str, SlotLease] = {}
        self._mapping: dict[str, SlotLease] = {}
        self._ready: set[str] = set()
        self._closed = False
        self._lent: SlotBuffer | None = None
        self._changed = threading.Condition()

    def serve(self, device: Device | None) -> None:
        """Have the driver of ``device`` know each slot that is offered from now on."""
        self._device = device

    def offer(self, leases: Sequence[SlotLease]) -> None:
        """Take over the agent's list of open slots: map new ones, let go of those it took back.

        An incarnation that is listed no more is forgotten: should an agent whose arena was
        emptied begin to count anew, its slots are new ones.
        """
        offered = {(lease.slot, lease.incarnation) for lease in leases}
        with self._changed:
            for slot in list(self._ready):
                if (slot, self._leases[slot].incarnation) not in offered:
                    self._drop(slot)
            for slot, lease in list(self._leases.items()):
                if (slot, lease.incarnation) not in offered and not self._is_taken(slot):
                    del self._leases[slot]
            fresh = [] if self._closed else [lease for lease in leases if self._is_news(lease)]
        for lease in fresh:
            self._map(lease)

    def acquire(self, plan_hash: str, timeout_s: float) -> SlotBuffer | None:
        """Return a slot of this plan, owned by the caller; None when there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(plan_hash) is not None, timeout_s)
            slot = self._find(plan_hash)
            if slot is None:
                return None
            self._lent = self._buffers[slot]  # first: Ctrl-C may come between any two lines
            self._ready.remove(slot)
            return self._lent

    def recall(self) -> bool:
        """Make the slot that was taken last ready again, unless it is closed or being copied into.

        For who was interrupted and does not know how far it got. Returns whether a copy has it.
        """
        with self._changed:
            buffer, self._lent = self._lent, None
            if buffer is None or self._buffers.get(buffer.slot) is not buffer:
                return False
            if buffer.is_writing and not buffer.in_copy:
                self._ready.add(buffer.slot)
            return buffer.is_writing and buffer.in_copy

    def put_back(self, buffer: SlotBuffer) -> None:
        """Return a slot that was taken and not closed: the next save may write it.

        Once the pool is closed there is none: the slot is dropped.
        """
        with self._changed:
            buffer.in_copy = False
            known = self._buffers.get(buffer.slot) is buffer
            if known and buffer.is_writing and not self._closed:
                self._ready.add(buffer.slot)
                self._changed.notify_all()
            elif known:
                self._drop(buffer.slot)
            else:
                buffer.drop()

    def forget(self, buffer: SlotBuffer) -> None:
        """Drop a slot that the agent has taken away from under its writer."""
        with self._changed:
            if self._buffers.get(buffer.slot) is buffer:
                self._drop(buffer.slot)

    def reset(self, keep: str = "") -> None:
        """Drop every slot that no save has taken and that is not of plan ``keep``."""
        with self._changed:
            for slot in list(self._buffers):
                lease = self._leases.get(slot)
                kept = lease is not None and lease.plan_hash == keep
                if not kept and not self._is_taken(slot):
                    self._drop(slot)
            self._mapping = {s: one for s, one in self._mapping.items() if one.plan_hash == keep}

    def close(self) -> None:
        """Drop every slot that no save has taken; none is mapped any more."""
        with self._changed:
            self._closed = True
            self.reset()

    def _is_taken(self, slot: str) -> bool:
        buffer = self._buffers.get(slot)
        return buffer is not None and buffer.is_writing and slot not in self._ready

    def _is_news(self, lease: SlotLease) -> bool:
        known = self._leases.get(lease.slot)
        return known is None or lease.incarnation > known.incarnation

    def _find(self, plan_hash: str) -> str | None:
        return next((s for s in self._ready if self._leases[s].plan_hash == plan_hash), None)

    def _drop(self, slot: str) -> None:
        self._ready.discard(slot)
        self._buffers.pop(slot).drop()

    def _map(self, lease: SlotLease) -> None:
        """Open or reuse the slot's mapping; slow for a new one, so outside the lock."""
        with self._changed:
            known = self._buffers.get(lease.slot)
            if self._closed or (known is not None and known.is_writing):
                return  # Being written under an older lease: whoever writes will find out.
            self._buffers.pop(lease.slot, None)
            self._mapping[lease.slot] = lease
        try:
            buffer = self._mapped(lease, known)
            self._register(buffer)
        except (CheckpointError, OSError) as error:
            log.warning("slot %s cannot be written and is not used any more: %s", lease.slot, error)
            with self._changed:
                self._mapping.pop(lease.slot, None)
            if known is not None:
                known.drop()
            return
        with self._changed:
            self._leases[lease.slot] = lease
            if self._mapping.pop(lease.slot, None) is None:
                buffer.drop()
                return
            self._buffers[lease.slot] = buffer
            self._ready.add(lease.slot)
            self._changed.notify_all()

    def _mapped(self, lease: SlotLease, known: SlotBuffer | None) -> SlotBuffer:
        if known is not None:
            try:
                known.reuse(lease)
            except (NotFoundError, PreconditionError):
                known.drop()  # The name is another file now.
            else:
                return known
        return SlotBuffer.open(self._arena, lease)

    def _register(self, buffer: SlotBuffer) -> None:
        """Once for each mapping; here, since it takes long and nobody waits for this thread."""
        device = self._device
        if device is None:
            return
        try:
            buffer.register(device)
        except RuntimeError as error:
            self._on_refusal(f"{device.name}: {error}")
