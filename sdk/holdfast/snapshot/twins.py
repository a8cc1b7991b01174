"""Fills slots for copies of other ranks' segments with what this rank has alike: its twins.

Data-parallel ranks have the same parameters and the same optimizer state, and of each tensor one of
them saves it. What another saves is copied here, too, into the slot in which this node is about to
get that segment: then it need not come over the network. All of it is a hint, since whoever takes
the slot over compares digests; so nothing here is waited for, and each failure costs a transfer.

A slot that is lent still has the head of the segment that it held last: the place of each tensor.
The head is taken out before anything is written, so that nobody takes the rest for a segment.
Sizes are bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from holdfast.copying.batches import BATCH_TENSORS_MAX, Pair, cut
from holdfast.copying.copier import Copier
from holdfast.copying.copiers import Copiers
from holdfast.copying.port import Device
from holdfast.core.session import SlotLease
from holdfast.errors import CheckpointError
from holdfast.format.header import parse_header
from holdfast.format.segment import TensorEntry, TensorSpec, header_length
from holdfast.logs import steady_logger
from holdfast.reading.dtypes import dtype_name, is_freed
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.plan import SavePlan, is_deferred
from holdfast.snapshot.plan_hash import stored_name
from holdfast.snapshot.pool import SlotPool
from holdfast.state.survey import CapturedTensor, Home

CHUNK_BYTES_MAX = 8 << 20
"""An optimizer's step waits for no more than one."""
PLANS_COUNT_MAX = 64
HEAD_BYTES = 8

log = steady_logger(__name__)


class _Chunk(NamedTuple):
    """What is copied by one call: tensors of the state, and their places in a slot."""

    device: Device | None
    targets: list[torch.Tensor]
    tensors: list[torch.Tensor]


class _Filling(NamedTuple):
    """Of one slot and one plan: made once, since a loop over tensors holds training up."""

    plan: SavePlan
    plan_hash: str
    chunks: list[_Chunk]


class Twins:
    """The slots that were lent to this rank, and what of it goes where.

    ``offer`` is called on the watch thread, ``fill`` on the copy thread.
    """

    def __init__(self, arena: Path) -> None:
        self._pool = SlotPool(arena)
        self._entries: dict[str, Sequence[TensorEntry]] = {}
        self._fillings: WeakKeyDictionary[SlotBuffer, _Filling] = WeakKeyDictionary()
        self._guard = threading.Lock()

    def serve(self, device: Device | None) -> None:
        """See ``SlotPool.serve``."""
        self._pool.serve(device)

    def offer(self, leases: Sequence[SlotLease]) -> None:
        """Take over the agent's list of slots to fill."""
        self._pool.offer(leases)
        for plan_hash in {lease.plan_hash for lease in leases} - self._entries.keys():
            buffer = self._pool.acquire(plan_hash, 0.0)
            if buffer is None:
                continue
            entries = _layout(buffer, plan_hash)
            with self._guard:
                if len(self._entries) >= PLANS_COUNT_MAX:
                    self._entries.clear()
                self._entries[plan_hash] = entries
            self._pool.put_back(buffer)

    def fill(self, plan: SavePlan, copiers: Copiers, stops: Callable[[], bool]) -> None:
        """Copy what is alike into each slot that is there, until ``stops``, and close it.

        What was not copied by then is fetched, as all of it was.
        """
        with self._guard:
            known = list(self._entries)
        for plan_hash in known:
            if stops():
                return
            buffer = self._pool.acquire(plan_hash, 0.0)
            if buffer is None:
                continue
            try:
                buffer.write(0, bytes(HEAD_BYTES))
                for chunk in self._filling(plan, buffer, plan_hash).chunks:
                    _copy(chunk, copiers.of(chunk.device), stops)
                buffer.close_slot()
            except (CheckpointError, OSError, RuntimeError) as error:
                log.warning("slot %s is not filled for a copy: %s", buffer.slot, error)
                copiers.clear_up()
                self._pool.forget(buffer)

    def close(self) -> None:
        """Let go of all slots."""
        self._pool.close()

    def _filling(self, plan: SavePlan, buffer: SlotBuffer, plan_hash: str) -> _Filling:
        known = self._fillings.get(buffer)
        if known is None or known.plan is not plan or known.plan_hash != plan_hash:
            with self._guard:
                entries = self._entries.get(plan_hash, ())
            known = _Filling(plan, plan_hash, _chunks(plan, buffer, entries))
            self._fillings[buffer] = known
        return known


def _copy(chunk: _Chunk, copier: Copier, stops: Callable[[], bool]) -> None:
    """Copy one chunk, unless something of it was freed, or has another shape by now.

    Nothing is queued behind what is under way: a step of training would wait for it.
    """
    if stops():
        return
    sources = list(map(torch.Tensor.detach, chunk.tensors))  # they hold what is copied
    shapes = [target.shape for target in chunk.targets]
    if any(map(is_freed, sources)) or [source.shape for source in sources] != shapes:
        return
    if len(sources) > 1:
        copier.later(chunk.targets, sources)
        copier.land()
        return
    for target, source in cut((chunk.targets[0], sources[0]), CHUNK_BYTES_MAX):
        if stops():
            return
        copier.later([target], [source])
        copier.land()


def twins_of(plan: SavePlan) -> Mapping[TensorSpec, CapturedTensor]:
    """Return what of the state another rank saves and this one has alike, by what it is there."""
    return {
        TensorSpec(
            fqn=stored_name(t, plan.capture.rank, plan.capture.world_size),
            dtype=dtype_name(t.fqn, t.tensor),
            shape=t.shape,
            box=t.box,
        ): t
        for t in _alike(plan)
    }


def has_twins(plan: SavePlan) -> bool:
    """Tell whether there is any of it."""
    return next(_alike(plan), None) is not None


def _alike(plan: SavePlan) -> Iterator[CapturedTensor]:
    for t in plan.survey.tensors:
        shared = t.home is Home.SHARED and plan.capture.world_size > 1
        # A scalar that several hold is saved by each of them.
        shared = shared or (t.home is Home.HOLDERS and len(t.holders) > 1 and bool(t.shape))
        if shared and is_deferred(t, plan.devices):
            yield t


def _chunks(plan: SavePlan, buffer: SlotBuffer, entries: Sequence[TensorEntry]) -> list[_Chunk]:
    """Return what goes where in a slot with these tensors, by what has it."""
    twins = twins_of(plan)
    found: dict[Device | None, list[Pair]] = {}
    for entry in entries:
        twin = twins.get(entry.spec)
        if twin is not None:
            pairs = found.setdefault(plan.devices.of(twin.tensor), [])
            pairs.append((buffer.place(entry), twin.tensor))
    return [
        _Chunk(device, [target for target, _ in group], [tensor for _, tensor in group])
        for device, pairs in found.items()
        for group in _groups(pairs)
    ]


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs in order, in lists of bounded size; what is longer is alone in one."""
    group: list[Pair] = []
    length_bytes = 0
    for pair in pairs:
        size = pair[0].nbytes
        full = length_bytes + size > CHUNK_BYTES_MAX or len(group) == BATCH_TENSORS_MAX
        if group and full:
            yield group
            group, length_bytes = [], 0
        group.append(pair)
        length_bytes += size
    if group:
        yield group


def _layout(buffer: SlotBuffer, plan_hash: str) -> Sequence[TensorEntry]:
    """Return the tensors of the segment that a slot held last; none if that cannot be told."""
    head = buffer.head(HEAD_BYTES)
    try:
        header = parse_header(buffer.head(header_length(head)), buffer.length_bytes)
    except (CheckpointError, ValueError) as error:
        log.info("slot %s is filled for no copy: %s", buffer.slot, error)
        return ()
    return header.entries if header.identity.plan_hash == plan_hash else ()
