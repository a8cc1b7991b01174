"""The save plan: which tensors go where in the segment, decided once and reused.

A plan holds tensors, not names. As long as ``is_current`` says so, a save writes digits into the
header, the blob, and copies; nothing is walked by name.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch.optim import Optimizer

from holdfast.copying.batches import BATCH_BYTES_MAX, BATCH_TENSORS_MAX
from holdfast.copying.cuda import CUDA
from holdfast.copying.port import Device, Devices
from holdfast.core.ids import Generation, Rank, ShardId, Step, job_name, run_id
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.format import blob as blobs
from holdfast.format.boxes import whole
from holdfast.format.names import blob_name, own_name
from holdfast.format.segment import (
    HeaderTemplate,
    SegmentIdentity,
    TensorEntry,
    TensorSpec,
    blob_spec,
    header_template,
)
from holdfast.format.tally import encode
from holdfast.garbage import no_collection
from holdfast.reading.dtypes import check_memory, dtype_name
from holdfast.snapshot.frozen_pieces import FrozenPieces, is_watched
from holdfast.snapshot.pieces import Piece, Run
from holdfast.snapshot.plan_hash import hash_of, shared_hash, stored_name, tally_of
from holdfast.state.capture import Estimate, LiveState
from holdfast.state.left_out import unsaved_parameters
from holdfast.state.survey import CapturedTensor, Home, Identity, Survey

BLOB_BYTES_MIN = 16 << 10
BLOB_GROWTH = 1.25
_AT_ONCE = 1024
_VERSION = operator.attrgetter("_version")
_KIND = operator.attrgetter("shape", "dtype")


class Source(Protocol):
    """What is saved: a user's mapping (``Capture``), or what a framework planned (``Given``)."""

    rank: int
    world_size: int

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that write what is deferred."""
        ...

    def survey(self) -> Survey:
        """Return the tensors that stay the same objects from save to save."""
        ...

    def identity(self, survey: Survey) -> Identity:
        """Return what must stay the same for ``survey`` to hold."""
        ...

    def same_objects(self, live: LiveState) -> bool:
        """Tell whether ``live`` was taken of the objects of the last survey."""
        ...

    def live(self, survey: Survey) -> LiveState:
        """Take everything that is not in the survey, as of now."""
        ...

    def static_text(self, survey: Survey) -> bytes:
        """Return the part of the text that stays the same while the survey holds."""
        ...

    def never_defer(self, fqns: Iterable[str]) -> None:
        """Copy these tensors before a save returns from now on."""
        ...

    def thaw(self, fqns: Iterable[str], why: str) -> None:
        """Take these tensors for frozen no more: they have changed, as ``why`` says."""
        ...

    @property
    def surprises(self) -> Sequence[str]:
        """What has changed though it was declared frozen, for people."""
        ...

    def estimate(self) -> Estimate:
        """Return the bytes to reserve."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The live part of one save, and how often each eager tensor had been written by then."""

    live: LiveState
    versions: list[int]


class SavePlan:
    """Where everything goes in this rank's segment.

    Invariants: ``length_bytes`` and every position are constant. ``is_current`` is called just
    before each ``CopyEngine.begin``: what it takes of the live state is what that save writes.
    ``left_out`` says what is trained and in no save. What is ``frozen`` is copied into a slot that
    does not have it yet, before a save returns, and is no part of ``eager``. ``chunks`` are the
    runs of ``deferred`` that are copied by one call each, ``eager_runs`` those of ``eager``;
    accelerators come first, since they copy while the host does. ``accelerators`` are those that
    hold any of it.
    """

    def __init__(
        self,
        capture: Source,
        survey: Survey,
        live: LiveState,
        template: HeaderTemplate,
        mine: Mapping[str, CapturedTensor],
        plan_hash: str,
        devices: Devices,
    ) -> None:
        self.capture = capture
        self.devices = devices
        self.template = template
        self.plan_hash = plan_hash
        self.length_bytes = template.length_bytes
        self.survey = survey
        self._identity = capture.identity(survey)
        self._static = capture.static_text(survey)
        self._staged: LiveState | None = None
        self._broken = False
        self.left_out = unsaved_parameters(survey, live.objects, live.tensors.values())
        entries = {entry.spec.fqn: entry for entry in template.entries}
        self.blob_entry = entries[blob_name(capture.rank)]
        later = {name: t for name, t in mine.items() if is_deferred(t, devices)}
        kept = {name: t for name, t in mine.items() if t.frozen and is_watched(t.tensor, t.outer)}
        at_once = {n: t for n, t in mine.items() if n not in later and n not in kept}
        self.deferred, where = _pieces(later, entries, devices)
        self.chunks = _chunks(self.deferred, where)
        self._far_count = sum([device is not None for device in where])
        self.eager, where = _pieces(at_once, entries, devices)
        self.eager_runs = _spans(where)
        frozen, where = _pieces(kept, entries, devices)
        outers = [kept[piece.entry.spec.fqn].outer for piece in frozen]
        self.frozen = FrozenPieces(frozen, _spans(where), outers)
        self._fqns = {name: t.fqn for name, t in kept.items()}
        runs = [*self.chunks, *self.eager_runs, *self.frozen.runs]
        self.accelerators = list(dict.fromkeys(run.device for run in runs if run.device))
        self.live_entries = {
            name: entries[
                live.specs[name].fqn if name in live.specs else own_name(name, capture.rank)
            ]
            for name in live.tensors
        }
        self._parameters = [t.fqn for t in later.values() if t.parameter]
        counted = [t.tensor for t in later.values() if t.parameter]
        self._counted = [counted[i : i + _AT_ONCE] for i in range(0, len(counted), _AT_ONCE)]
        self._places: Sequence[torch.Tensor] = ()
        self._sources: list[torch.Tensor] = []
        self._addresses: list[int] = []

    @property
    def blob_capacity_bytes(self) -> int:
        """Room for the text of this rank."""
        return self.blob_entry.end - self.blob_entry.begin

    @property
    def pieces(self) -> list[Piece]:
        """All tensors that stay the same objects, and where they go."""
        return [*self.deferred, *self.eager, *self.frozen.pieces]

    def is_current(self) -> bool:
        """Tell whether the state still has the structure of this plan; stages the live part."""
        self._staged = None
        if self._broken or not self._identity.holds() or self._has_thawed():
            return False
        live = self.capture.live(self.survey)
        if not (self.capture.same_objects(live) and self._fits(live)):
            return False
        self._staged = live
        return True

    def _has_thawed(self) -> bool:
        """Tell whether something frozen has changed; it is copied at each save from now on."""
        changed = self.frozen.changed()
        self._thaw(changed, "has changed since it was saved, or lies elsewhere")
        return bool(changed)

    def compare_frozen(self, digests: Sequence[bytes]) -> None:
        """Compare what is frozen, as it was just copied, with the first copy of it.

        What was written between the two without a word to torch is found here, and is frozen no
        more; who writes so does it at each step, as a rule.
        """
        self._thaw(self.frozen.unlike(digests), "lies among bytes that changed unseen")

    def found_changed(self, names: Sequence[str]) -> None:
        """Take what was written without a word to torch for frozen no more."""
        self._thaw(names, "has changed unseen since it was copied")

    def _thaw(self, names: Sequence[str], why: str) -> None:
        if names:
            self.capture.thaw([self._fqns[name] for name in names], why)
            self.give_up()

    def take_live(self) -> tuple[bytes, dict[str, torch.Tensor]]:
        """Return the blob, padded to its capacity, and the live tensors by name.

        Raises:
            PreconditionError: the state has changed so that this plan does not hold it.
        """
        live, self._staged = self._staged, None
        if live is None:
            live = self.capture.live(self.survey)
            if not self._fits(live):
                raise PreconditionError("the state has changed since the save plan was made")
        text = blobs.join(self._static, live.text)
        return text.ljust(self.blob_capacity_bytes), live.tensors

    def moment(self) -> Moment:
        """Return the values beside parameters and optimizers, to come back to them later."""
        live = self._staged or self.capture.live(self.survey)
        return Moment(live, self._eager_versions(live))

    def go_back(self, moment: Moment) -> bool:
        """Have the next save write ``moment``; False: not all its tensors are as they were."""
        same = not self._broken and self._identity.holds() and not self._has_thawed()
        if not same or self._eager_versions(moment.live) != moment.versions:
            return False
        self._staged = moment.live
        return True

    def _eager_versions(self, live: LiveState) -> list[int]:
        tensors = [*(piece.tensor for piece in self.eager), *live.tensors.values()]
        return [0 if tensor.is_inference() else _VERSION(tensor) for tensor in tensors]

    def sources(self) -> list[torch.Tensor]:
        """Return what the deferred tensors are now, whatever ``.data =`` makes of them later.

        Who has the list holds their memory; of that of devices nobody else does.

        Raises:
            PreconditionError: see ``check``.
        """
        if self._places is not self._identity.places:
            self.check(self.deferred)
            self._places = self._identity.places
            self._sources = [piece.tensor.detach() for piece in self.deferred[self._far_count :]]
            self._addresses = _addresses(self._sources)
        if not self._far_count:
            return self._sources
        far = [piece.tensor.detach() for piece in self.deferred[: self._far_count]]
        near = self._addresses[-len(self._sources) :] if self._sources else []
        self._addresses = [*_addresses(far), *near]
        return [*far, *self._sources]

    def check_sources(self, sources: Sequence[torch.Tensor], chunk: Run) -> None:
        """Do nothing if ``sources``, the last answer, still have the memory of this chunk.

        Raises:
            InvalidRequestError: some of it was freed, and who read it would end the process.
        """
        part = slice(chunk.begin, chunk.end)
        if _addresses(sources[part]) == self._addresses[part]:
            return
        for piece, source in zip(self.deferred[part], sources[part], strict=True):
            check_memory(piece.entry.spec.fqn, source)

    def check(self, pieces: Iterable[Piece]) -> None:
        """Do nothing if the tensors of ``pieces`` are of the sizes and dtypes that were planned.

        Raises:
            PreconditionError: one is not; ``is_current`` is false from then on.
        """
        for tensor, entry, kind in pieces:
            if _KIND(tensor) != kind:
                self.give_up()
                raise PreconditionError(
                    f"tensor {entry.spec.fqn!r} is {tuple(tensor.shape)} {tensor.dtype} now, "
                    f"not {tuple(kind[0])} {kind[1]} as planned"
                )

    def versions(self) -> list[int]:
        """Return how often each deferred parameter was written, as far as autograd sees it."""
        found: list[int] = []
        for part in self._counted:  # between two of them the interpreter's lock may change hands
            found += map(_VERSION, part)
        return found

    def written_between(self, before: list[int], now: list[int]) -> list[str]:
        """Return which deferred parameters were written between two answers of ``versions``."""
        each = zip(self._parameters, before, now, strict=True)
        return [fqn for fqn, old, new in each if old != new]

    def give_up(self) -> None:
        """Make ``is_current`` false for good: a tensor was found that the plan does not fit."""
        self._broken = True

    def _fits(self, live: LiveState) -> bool:
        length_bytes = len(blobs.join(self._static, b"")) + len(live.text)
        if length_bytes > self.blob_capacity_bytes or len(live.tensors) != len(self.live_entries):
            return False
        for name, tensor in live.tensors.items():
            entry, spec = self.live_entries.get(name), live.specs.get(name)
            if entry is None or (spec is not None and entry.spec != spec):
                return False
            if entry.spec.box.lengths != tuple(tensor.shape):
                return False
            if entry.spec.dtype != dtype_name(name, tensor):
                return False
        return True


@no_collection()
def make_plan(
    capture: Source,
    *,
    job: str,
    run: str,
    generation: int,
    rank: int,
    world_size: int,
    devices: Devices = CUDA,
) -> SavePlan:
    """Return the plan of ``capture`` as its state is now.

    Every rank of the world must plan at the same step: which rank saves a replicated tensor is
    computed by each from names and sizes alone (F37).

    Raises:
        InvalidRequestError: a value or tensor that cannot be saved, named.
    """
    survey = capture.survey()
    live = capture.live(survey)
    text_bytes = len(blobs.join(capture.static_text(survey), live.text))
    capacity = max(BLOB_BYTES_MIN, int(text_bytes * BLOB_GROWTH))
    capacity = min(capacity + -capacity % 4096, blobs.BLOB_BYTES_MAX)
    if text_bytes > capacity:
        raise InvalidRequestError(
            f"values of {text_bytes} bytes, tensors apart, exceed {capacity}: keep big values as "
            f"tensors"
        )
    mine = {stored_name(t, rank, world_size): t for t in _own_tensors(survey, rank, world_size)}
    of_mine = [_spec(name, t) for name, t in mine.items()]
    specs = [spec for spec, t in zip(of_mine, mine.values(), strict=True) if not t.idle]
    specs += [
        live.specs.get(name) or _live_spec(name, tensor, rank)
        for name, tensor in live.tensors.items()
    ]
    # What stays as it is lies apart from what changes, so that whole parts of it need not travel;
    # behind it, since the header changes, too.
    specs += [spec for spec, t in zip(of_mine, mine.values(), strict=True) if t.idle]
    specs.append(blob_spec(blob_name(rank), capacity))
    plan_hash = hash_of(specs, rank, world_size)
    if world_size > 1:
        saved = zip(mine.values(), of_mine, strict=True)
        plan_hash += f"-{encode(tally_of(survey.tensors, saved, rank, world_size))}"
        plan_hash += f".{shared_hash(survey.tensors, world_size)}"
    identity = SegmentIdentity(
        id=ShardId(run_id(run), Step(0), Generation(generation), Rank(rank)),
        job=job_name(job),
        world_size=world_size,
        plan_hash=plan_hash,
    )
    return SavePlan(
        capture, survey, live, header_template(identity, specs), mine, plan_hash, devices
    )


def balance(sizes: Sequence[tuple[str, int]], loads: Sequence[int]) -> dict[str, int]:
    """Return which rank saves which replicated tensor: biggest first, to the least loaded.

    Args:
        sizes: Name and bytes of every tensor, in any order.
        loads: Bytes that each rank has to save already, by rank.

    >>> balance([("a", 4), ("b", 6), ("c", 2)], [0, 0])
    {'b': 0, 'a': 1, 'c': 1}
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: dict[str, int] = {}
    for name, length_bytes in sorted(sizes, key=lambda item: (-item[1], item[0])):
        load, rank = heap[0]
        owners[name] = rank
        heapq.heapreplace(heap, (load + length_bytes, rank))
    return owners


def _own_tensors(survey: Survey, rank: int, world_size: int) -> list[CapturedTensor]:
    loads = [0] * world_size
    loads[0] = sum(t.tensor.nbytes for t in survey.tensors if t.home is Home.FIRST)
    shared = [(t.fqn, t.tensor.nbytes) for t in survey.tensors if t.home is Home.SHARED]
    owners = balance(shared, loads) if world_size > 1 else {}
    owners |= _owners_among_holders(survey)
    return [
        t
        for t in survey.tensors
        if t.home is Home.RANK
        or (t.home is Home.FIRST and rank == 0)
        or (t.home in (Home.SHARED, Home.HOLDERS) and owners.get(t.fqn, rank) == rank)
    ]


def _owners_among_holders(survey: Survey) -> dict[str, int]:
    """Return which rank saves each box that several hold; a scalar is saved by all of them.

    Holders of one box have the same list of boxes that they hold together, so each of them comes to
    the same answer; ranks that hold none of them need not know it.
    """
    owners: dict[str, int] = {}
    held: dict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)
    for t in survey.tensors:
        if t.home is not Home.HOLDERS or not t.shape:
            continue
        if len(t.holders) == 1:
            owners[t.fqn] = t.holders[0]
        else:
            held[t.holders].append((t.fqn, t.tensor.nbytes))
    for holders, sizes in held.items():
        for fqn, at in balance(sizes, [0] * len(holders)).items():
            owners[fqn] = holders[at]
    return owners


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))  # a loop in C


def _pieces(
    captured: Mapping[str, CapturedTensor], entries: Mapping[str, TensorEntry], devices: Devices
) -> tuple[list[Piece], list[Device | None]]:
    """Return a piece of each tensor and what it lies on; those of one device come together."""
    groups: dict[Device | None, list[Piece]] = {}
    for name, t in captured.items():
        piece = Piece(t.tensor, entries[name], _KIND(t.tensor))
        groups.setdefault(devices.of(t.tensor), []).append(piece)
    of_host = groups.pop(None, [])
    pieces = [piece for group in groups.values() for piece in group]
    where: list[Device | None] = [device for device, group in groups.items() for _ in group]
    return [*pieces, *of_host], [*where, *[None] * len(of_host)]


def is_deferred(captured: CapturedTensor, devices: Devices) -> bool:
    """Tell whether it may be copied while training goes on."""
    # Who copies by other means does not share the order of what training queues there.
    tensor = captured.tensor
    return captured.deferred and (tensor.is_cpu or devices.of(tensor) is not None)


def _spec(stored: str, captured: CapturedTensor) -> TensorSpec:
    return TensorSpec(
        fqn=stored,
        dtype=dtype_name(captured.fqn, captured.tensor),
        shape=captured.shape,
        box=captured.box,
    )


def _live_spec(name: str, tensor: torch.Tensor, rank: int) -> TensorSpec:
    shape = tuple(tensor.shape)
    return TensorSpec(
        fqn=own_name(name, rank), dtype=dtype_name(name, tensor), shape=shape, box=whole(shape)
    )


def _spans(where: Sequence[Device | None]) -> list[Run]:
    """Return the runs of equal devices."""
    spans: list[Run] = []
    for device, group in groupby(where):
        begin = spans[-1].end if spans else 0
        spans.append(Run(device, begin, begin + len(list(group))))
    return spans


def _chunks(pieces: Sequence[Piece], where: Sequence[Device | None]) -> list[Run]:
    """Return runs of bounded size; a tensor that exceeds it is a run of its own."""
    chunks: list[Run] = []
    for device, first, last in _spans(where):
        begin, length_bytes = first, 0
        for index in range(first, last):
            size = pieces[index].entry.end - pieces[index].entry.begin
            full = length_bytes + size > BATCH_BYTES_MAX or index - begin >= BATCH_TENSORS_MAX
            if full and index > begin:
                chunks.append(Run(device, begin, index))
                begin, length_bytes = index, 0
            length_bytes += size
        chunks.append(Run(device, begin, last))
    return chunks
