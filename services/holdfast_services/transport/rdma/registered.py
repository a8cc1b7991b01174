"""Which memory the card knows, and who may read which part of it.

Memory is registered in pieces of ``PART_BYTES``, when a part is first lent or received, and stays
so until its mapping goes: a slot that is used again is not registered again. Memory that is no
mapping is registered for as long as one part takes. Only what is lent is readable from afar.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from holdfast.errors import UnavailableError
from holdfast.format.digest import PART_BYTES
from holdfast_services.transport.rdma.verbs import Card, Queue, Region, Window

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Bytes that the card knows; ``passing``: only until they are let go."""

    view: memoryview
    address: int
    region: Region
    passing: bool


@dataclass(slots=True, eq=False)
class Lent:
    """Bytes that one peer may read, until they are taken back; ``window`` None: they are."""

    held: Held
    window: Window | None

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self.held.address

    @property
    def key(self) -> int:
        """The remote key; 0 when the bytes are called in already."""
        window = self.window
        return window.key if window is not None else 0


class RegisteredMemory:
    """The registered memory of one card; safe to use from several threads."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._guard = threading.Lock()
        self._registering = threading.Lock()
        # A mapping that goes takes its regions along: closed as they are collected.
        self._kept: WeakKeyDictionary[mmap.mmap, dict[int, Region]] = WeakKeyDictionary()
        self._lent: defaultdict[int, set[Lent]] = defaultdict(set)
        self.revocations_count = 0

    def hold(self, view: memoryview) -> Held:
        """Have bytes registered until ``let_go``.

        Raises:
            UnavailableError: the card cannot register them; says why.
        """
        address = _address(view)
        memory = view.obj
        if isinstance(memory, mmap.mmap):
            begin = address - _address(memoryview(memory))
            index = begin // PART_BYTES
            if begin + len(view) <= (index + 1) * PART_BYTES:
                return Held(view, address, self._piece(memory, index), passing=False)
        return Held(view, address, self._card.register(address, len(view)), passing=True)

    def let_go(self, held: Held) -> None:
        """Forget bytes that are registered in passing; the card uses them no more."""
        if held.passing:
            held.region.close()

    def lend(self, view: memoryview, queue: Queue) -> Lent:
        """Let the other side of ``queue`` read these bytes until they are taken back.

        Raises:
            UnavailableError: they cannot be registered, or the connection is in error.
        """
        held = self.hold(view)
        lent = Lent(held, None)
        try:
            window = self._card.window()
            try:
                queue.bind(window, held.region, held.address, len(view))
            except UnavailableError:
                window.close()
                raise
        except UnavailableError:
            self.let_go(held)
            raise
        with self._guard:
            lent.window = window
            self._lent[id(view.obj)].add(lent)
        return lent

    def take_back(self, lent: Lent) -> None:
        """Have nobody read these bytes any more; once for each ``lend``."""
        memory = id(lent.held.view.obj)
        with self._guard:
            self._lent[memory].discard(lent)
            if not self._lent[memory]:
                del self._lent[memory]
            window, lent.window = lent.window, None
        if window is not None:
            window.close()
        self.let_go(lent.held)

    def revoke(self, view: memoryview) -> None:
        """Have nobody read anything of this view's memory, whoever it is lent to."""
        with self._guard:
            self.revocations_count += 1
            called_in = self._lent.pop(id(view.obj), set())
            windows = [lent.window for lent in called_in if lent.window is not None]
            for lent in called_in:
                lent.window = None
        for window in windows:
            try:
                window.close()
            except UnavailableError as error:  # a peer may still read what it cannot believe
                log.error("memory is withdrawn, and was not called in: %s", error)  # noqa: TRY400

    def _piece(self, memory: mmap.mmap, index: int) -> Region:
        with self._registering:
            regions = self._kept.setdefault(memory, {})
            region = regions.get(index)
            if region is None:
                begin = index * PART_BYTES
                length_bytes = min(PART_BYTES, len(memory) - begin)
                address = _address(memoryview(memory)) + begin
                region = regions[index] = self._card.register(address, length_bytes)
            return region


def _address(view: memoryview) -> int:
    if view.readonly:
        raise UnavailableError("memory that is read-only cannot be registered for RDMA")
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
