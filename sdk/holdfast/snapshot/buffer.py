"""A leased slot, mapped into this process: tensors of the arena's memory to copy into.

The file is opened once per process and holds a POSIX record lock while it may be written: the
lock frees when the process dies, however it dies. No other descriptor of the file may ever be
closed here, since that would free the lock too. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast import locks
from holdfast.copying.port import Device
from holdfast.core.session import SlotLease
from holdfast.core.slot_names import SlotName, SlotState, slot_name
from holdfast.errors import ConflictError, NotFoundError, PreconditionError, TruncatedShardError
from holdfast.format.digest import part_digest
from holdfast.format.segment import TensorEntry
from holdfast.logs import steady_logger
from holdfast.pages import populate_present
from holdfast.reading.dtypes import TORCH
from holdfast.snapshot.plan import SavePlan

_LOG = steady_logger(__name__)


@dataclass(frozen=True, slots=True)
class Views:
    """The places in one buffer of what is copied before a save returns, in the plan's order."""

    eager: list[torch.Tensor]
    live: dict[str, torch.Tensor]
    blob: tuple[int, int]


class SlotBuffer:
    """One slot's memory; written between ``open`` or ``reuse`` and ``close_slot``.

    Invariants: the mapping is as long as the file, and lives until ``drop``; the lock is held
    exactly while the slot is ``writing``. ``in_copy``: the copy thread writes it, and lets it go.
    A driver that the memory is registered with forgets it in ``drop``, before it is unmapped.
    What of a plan is frozen is *kept* from its first copy on, while nobody else had the slot.
    """

    def __init__(self, arena: Path, lease: SlotLease, fd: int, memory: mmap.mmap) -> None:
        self._arena = arena
        self._fd = fd
        self._map: mmap.mmap | None = memory
        self._bytes = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._name = SlotName(lease.slot, lease.incarnation, SlotState.WRITING)
        self._length_bytes = lease.length_bytes
        self._views: tuple[SavePlan, Views] | None = None
        self._deferred: tuple[SavePlan, list[torch.Tensor]] | None = None
        self._header_of: SavePlan | None = None
        self._kept: tuple[SavePlan, list[bytes]] | None = None
        self.in_copy = False
        self._registered_with: Device | None = None
        self._was_refused = False
        self._pid = os.getpid()

    @classmethod
    def open(cls, arena: Path, lease: SlotLease) -> SlotBuffer:
        """Map the leased slot, populated, and lock it.

        Raises:
            NotFoundError: the slot was taken away.
            ConflictError: another process holds its lock.
            TruncatedShardError: the file is not as long as the lease says.
        """
        name = slot_name(f"{lease.slot}.{lease.incarnation}.{SlotState.WRITING.value}").file_name
        try:
            fd = os.open(arena / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as cause:
            raise NotFoundError(f"slot {name} was taken away", slot=lease.slot) from cause
        try:
            _lock(fd, name)
            return cls(arena, lease, fd, _populated(fd, name, lease.length_bytes))
        except BaseException:
            os.close(fd)
            raise

    @property
    def slot(self) -> str:
        """The slot's name, the same over all incarnations."""
        return self._name.slot

    @property
    def incarnation(self) -> int:
        """The incarnation last leased."""
        return self._name.incarnation

    @property
    def length_bytes(self) -> int:
        """Length of file and mapping."""
        return self._length_bytes

    @property
    def is_writing(self) -> bool:
        """Whether this process may write: leased, locked, not closed."""
        return self._name.state is SlotState.WRITING and self._map is not None

    def register(self, device: Device) -> None:
        """Have the driver of ``device`` know the memory, once; who refused is not asked again.

        Raises:
            RuntimeError: it refuses: copies go through pageable memory.
        """
        if self._registered_with is not None or self._was_refused:
            return
        self._was_refused = True
        device.register(self._bytes)
        self._registered_with, self._was_refused = device, False

    def views(self, plan: SavePlan) -> Views:
        """Return the places of what is copied at once; made once per plan and buffer.

        Raises:
            PreconditionError: the plan is for another length.
        """
        if self._views is None or self._views[0] is not plan:
            self._check_fits(plan)
            views = Views(
                eager=[self._view(piece.entry) for piece in plan.eager],
                live={name: self._view(entry) for name, entry in plan.live_entries.items()},
                blob=(plan.blob_entry.begin, plan.blob_entry.end),
            )
            self._views = (plan, views)
        return self._views[1]

    def deferred(self, plan: SavePlan) -> list[torch.Tensor]:
        """Return the places of the plan's deferred tensors; made once, by who copies them.

        Raises:
            PreconditionError: the plan is for another length.
        """
        if self._deferred is None or self._deferred[0] is not plan:
            self._check_fits(plan)
            self._deferred = (plan, [self._view(piece.entry) for piece in plan.deferred])
        return self._deferred[1]

    def frozen(self, plan: SavePlan) -> list[torch.Tensor]:
        """Return the places of what is frozen in the plan, and keep nothing: it is overwritten."""
        self._kept = None
        return [self._view(piece.entry) for piece in plan.frozen.pieces]

    def place(self, entry: TensorEntry) -> torch.Tensor:
        """Return the place of one tensor.

        Raises:
            PreconditionError: the slot is not being written.
        """
        self._memory()
        return self._view(entry)

    def keeps(self, plan: SavePlan) -> bool:
        """Tell whether what is frozen in the plan is here from an earlier save."""
        return self._kept is not None and self._kept[0] is plan

    def keep(self, plan: SavePlan) -> Sequence[bytes]:
        """Note that all that is frozen in the plan has been copied; return the digests of it."""
        digests = self._digests(plan)
        self._kept = (plan, digests)
        return digests

    def check_kept(self, plan: SavePlan) -> bool:
        """Tell whether what is kept has the bytes that were copied; if not, nothing is kept."""
        assert self._kept is not None, "only what is kept is looked at again"
        if self._digests(plan) == self._kept[1]:
            return True
        self._kept = None
        return False

    def _digests(self, plan: SavePlan) -> list[bytes]:
        with memoryview(self._memory()) as view:
            return [part_digest(view[begin:end]) for begin, end in plan.frozen.spans]

    def write_header(
        self, plan: SavePlan, *, step: int, generation: int, parent: tuple[int, int] | None
    ) -> None:
        """Write the header of this save; only its digits where the rest is there already."""
        memory = self._memory()
        if self._header_of is not plan:
            data = plan.template.fill(step=step, generation=generation, parent=parent)
            memory[: len(data)] = data
            self._header_of = plan
            return
        patches = plan.template.patches(step=step, generation=generation, parent=parent)
        for begin, data in patches:
            memory[begin : begin + len(data)] = data

    def between(self, begin: int, end: int) -> torch.Tensor:
        """Return the bytes ``[begin, end)`` of the slot, to look at.

        Raises:
            PreconditionError: the slot is not being written.
        """
        self._memory()
        return self._bytes[begin:end]

    def head(self, length_bytes: int) -> bytes:
        """Return the first bytes of the slot."""
        return self._memory()[:length_bytes]

    def write(self, begin: int, data: bytes) -> None:
        """Write ``data`` at byte ``begin``."""
        self._memory()[begin : begin + len(data)] = data

    def close_slot(self) -> None:
        """Rename the slot to ``closed``, then let go of its lock: no more writes.

        Raises:
            NotFoundError: the slot was taken away; what was written is lost. The lock is let go
                all the same.
        """
        name, closed = self._name.file_name, self._name.to(SlotState.CLOSED)
        gone = False
        try:
            (self._arena / name).rename(self._arena / closed.file_name)
            gone = True
        except FileNotFoundError as cause:
            raise NotFoundError(f"slot {name} was taken away", slot=self.slot) from cause
        finally:
            # Ctrl-C may have come before the rename: then the slot is still ours to write.
            if gone or not (self._arena / name).exists():
                self._name, self.in_copy = closed, False
                locks.release(self._fd)

    def reuse(self, lease: SlotLease) -> None:
        """Lock the same slot again under a newer lease; the mapping stays.

        Raises:
            NotFoundError: the slot is another file now: drop this buffer, then open it anew.
            PreconditionError: the lease is of another slot or length.
            ConflictError: another process holds its lock.
        """
        name = SlotName(lease.slot, lease.incarnation, SlotState.WRITING)
        if (lease.slot, lease.length_bytes) != (self.slot, self._length_bytes) or not self._map:
            raise PreconditionError(f"{name.file_name} is not a lease of slot {self.slot}")
        _lock(self._fd, name.file_name)
        try:
            there = os.stat(self._arena / name.file_name, follow_symlinks=False)  # noqa: PTH116
        except FileNotFoundError as cause:
            locks.release(self._fd)
            raise NotFoundError(f"slot {name.file_name} was taken away") from cause
        if not os.path.samestat(there, os.fstat(self._fd)):
            locks.release(self._fd)
            raise NotFoundError(f"slot {name.file_name} is another file than before")
        if lease.incarnation != self._name.incarnation + 1:
            # In between it may have held somebody else's segment.
            self._header_of = self._kept = None
        self._name, self.in_copy = name, False

    def drop(self) -> None:
        """Forget views, mapping and descriptor; frees the lock if it is held. Idempotent."""
        self._views = self._deferred = self._kept = None
        self._header_of = None
        memory, self._map = self._map, None
        self._unregister()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if memory is None:
            return
        # With a view still held somewhere, the mapping goes when that goes.
        with contextlib.suppress(BufferError):
            memory.close()
        if os.getpid() == self._pid:
            os.close(self._fd)

    def _unregister(self) -> None:
        device, self._registered_with = self._registered_with, None
        if device is None or os.getpid() != self._pid:
            return
        try:
            device.unregister(self._bytes)
        except RuntimeError as error:  # such as after an error that ended its context
            _LOG.warning("slot %s stays registered with %s: %s", self.slot, device.name, error)

    def _check_fits(self, plan: SavePlan) -> None:
        if plan.length_bytes != self._length_bytes:
            raise PreconditionError(
                f"a plan of {plan.length_bytes} bytes in a slot of {self._length_bytes}"
            )

    def _memory(self) -> mmap.mmap:
        if self._map is None or not self.is_writing:
            raise PreconditionError(f"slot {self._name.file_name} is not being written")
        return self._map

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        spec = entry.spec
        return self._bytes[entry.begin : entry.end].view(TORCH[spec.dtype]).view(spec.box.lengths)


def _lock(fd: int, name: str) -> None:
    if not locks.take(fd):
        raise ConflictError(f"slot {name} is locked by another process")


def _populated(fd: int, name: str, length_bytes: int) -> mmap.mmap:
    """Map the file with its pages in place: the first copy would pay for each fault otherwise."""
    found_bytes = os.fstat(fd).st_size
    if found_bytes != length_bytes:
        raise TruncatedShardError(f"slot {name} has {found_bytes} bytes, not {length_bytes}")
    memory = mmap.mmap(fd, length_bytes)
    populate_present(memory)
    return memory
