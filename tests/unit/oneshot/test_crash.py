"""A save that ends anywhere leaves nothing or everything (P1): each store operation, both sides."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from holdfast.bucket import holding
from holdfast.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore.memory import MemoryStore
from holdfast.oneshot import sending, writing
from holdfast.reading import verified_parts as parts

WAIT_S = 30.0
WRITES = ("put", "delete", "begin", "put_part", "finish", "abort")


class Crash(BaseException):
    """The process is gone: no handler of ours sees it."""


class Faulty(MemoryStore):
    """Crashes before or after the ``at``-th writing operation, and at every one from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.at: int | None = None
        self.after = False
        self.done: list[str] = []
        self.lose_answer_of: str | None = None
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return self._guarded(name, found) if name in WRITES else found

    def _guarded(self, name, operation):
        def call(*args, **options):
            number = len(self.done)
            if self.at is not None and number == self.at and not self.after:
                raise Crash(name)
            if self.at is not None and number > self.at:
                raise Crash(name)
            result = operation(*args, **options)
            self.done.append(name)
            if self.at is not None and number == self.at and self.after:
                raise Crash(name)
            if name == "put" and args[0] == self.lose_answer_of:
                raise OutcomeUnknownError("the answer was lost")
            return result

        return call


@pytest.fixture
def store(monkeypatch):
    store = Faulty()
    monkeypatch.setattr(writing, "open_store", lambda path, *, make=False: store)
    monkeypatch.setattr(holding, "open_store", lambda path: store)
    return store


def state(value: int) -> dict[str, object]:
    return {"t": torch.full((3,), value), "n": value}


def readable() -> int | None:
    target = state(-1)
    try:
        holdfast.load("memory:", target)
    except NotFoundError:
        return None
    assert torch.equal(torch.full((3,), target["n"]), target["t"])
    return int(target["n"])


OPERATIONS = 7
OLD_IS_GONE = 2
"""The operation that ends an older checkpoint: all bytes of the new one are there by then."""


def test_the_sweep_covers_every_operation(store):
    holdfast.save("memory:", state(1))

    assert ["delete", "begin", "put_part", "delete", "finish", "put", "put"] == store.done
    store.done.clear()
    holdfast.save("memory:", state(2), overwrite=True)

    assert ["begin", "put_part", "delete", "delete", "finish", "put", "put"] == store.done
    assert "delete" == store.done[OLD_IS_GONE]
    assert len(store.done) == OPERATIONS


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(OPERATIONS))
def test_a_crash_anywhere_leaves_nothing_or_everything(store, at, after):
    store.at, store.after = at, after
    with pytest.raises(Crash):
        holdfast.save("memory:", state(1))
    store.at = None

    assert readable() == (1 if after and at == OPERATIONS - 1 else None)

    store.done.clear()
    if readable() is None:
        holdfast.save("memory:", state(2))
        assert 2 == readable()
        assert [] == list(store.open_uploads())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(OPERATIONS))
def test_a_crash_while_replacing_costs_the_old_one_only_in_the_exchange(store, at, after):
    """P1; defect A3: until all bytes of the new one are there, the old one is."""
    holdfast.save("memory:", state(1))
    store.done.clear()
    store.at, store.after = at, after
    with pytest.raises(Crash):
        holdfast.save("memory:", state(2), overwrite=True)
    store.at = None
    replaced = 2 if at + after == OPERATIONS else None

    assert readable() == (1 if at + after <= OLD_IS_GONE else replaced)
    assert ("manifest.json" in store._objects) is (readable() is not None), "it names what is gone"

    holdfast.save("memory:", state(3), overwrite=True)

    assert 3 == readable()
    assert [] == list(store.open_uploads())


def test_a_save_that_is_refused_leaves_the_old_one(store):
    """Defect A3: a value that cannot be saved is found before anything is deleted."""
    holdfast.save("memory:", state(1))
    store.done.clear()
    with pytest.raises(InvalidRequestError, match="'bad' holds"):
        holdfast.save("memory:", {**state(2), "bad": object()}, overwrite=True)
    with pytest.raises(InvalidRequestError, match="notes are not"):
        holdfast.save("memory:", state(2), overwrite=True, notes={"x": float("nan")})

    assert [] == store.done
    assert 1 == readable()


@pytest.mark.parametrize("call", ["begin", "put_part", "finish"])
def test_a_store_without_room_for_both_keeps_the_old_one(store, monkeypatch, call):
    """Defect A3: the new one takes its space beside the old one, not instead of it."""
    holdfast.save("memory:", state(1))

    def full(*_):
        raise ExhaustedError("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, call, full)
        with pytest.raises(ExhaustedError):
            holdfast.save("memory:", state(2), overwrite=True)

    # Finishing takes no space in any store that counts it at ``begin`` or with the parts.
    assert (None if call == "finish" else 1) == readable()
    assert [] == list(store.open_uploads())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("call", "count"), [("begin", 1), ("put_part", 1), ("finish", 1), ("put", 1), ("put", 2)]
)
def test_of_two_saves_into_one_path_none_says_saved_of_the_others_bytes(
    store, monkeypatch, call, count, overwrite
):
    """P1; defect C2: one stops before ``call``, the other goes all the way, then the first."""
    here, go = threading.Event(), threading.Event()
    plain, calls = getattr(store, call), itertools.count(1)
    said: list[str] = []

    def held_back(*args, **options):
        if next(calls) == count:
            here.set()
            assert go.wait(WAIT_S)
        return plain(*args, **options)

    def first():
        try:
            holdfast.save("memory:", state(1), overwrite=overwrite)
        except CheckpointError as error:
            said.append(error.kind)

    monkeypatch.setattr(store, call, held_back)
    thread = threading.Thread(target=first)
    thread.start()
    assert here.wait(WAIT_S)
    holdfast.save("memory:", state(2), overwrite=overwrite)
    go.set()
    thread.join(WAIT_S)

    assert readable() == (2 if said else 1)
    assert overwrite or said, "a checkpoint is not replaced unless asked"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_begins_beside_another_puts_nothing_over_what_that_one_has_saved(
    store, monkeypatch, overwrite
):
    """P1: held up with all its bytes sent, it wakes up when the other has said saved."""
    plain, threads = store.begin, []
    here, go = threading.Event(), threading.Event()
    said: list[str] = []

    def late():
        try:
            holdfast.save("memory:", state(1), overwrite=overwrite)
        except CheckpointError as error:
            said.append(error.kind)

    def begin(*args):
        if not threads:  # the one that will succeed has looked round, and begins
            threads.append(threading.Thread(target=late))
            threads[0].start()
            assert here.wait(WAIT_S)
        return plain(*args)

    def finish(*args):
        if threading.current_thread() in threads:
            here.set()
            assert go.wait(WAIT_S)
        return MemoryStore.finish(store, *args)

    monkeypatch.setattr(store, "begin", begin)
    monkeypatch.setattr(store, "finish", finish)
    holdfast.save("memory:", state(2), overwrite=overwrite)
    go.set()
    threads[0].join(WAIT_S)

    assert ["conflict"] == said
    assert 2 == readable()


def test_what_another_save_finishes_while_room_is_made_does_not_stay(store, monkeypatch):
    """Readers believe the listing, and nothing would put another file in the place of this one."""
    begin, delete, theirs = store.begin, store.delete, []

    def begin_both(*args):
        if not theirs:
            theirs.append(begin("shard-00001-of-00002.safetensors", 1, PART_BYTES))
            theirs.append(store.put_part(theirs[0], 0, memoryview(b"x")))
        return begin(*args)

    def delete_and_finish(keys):
        delete(keys)
        if theirs:
            with suppress(NotFoundError):
                store.finish(theirs[0], theirs[1:])

    monkeypatch.setattr(store, "begin", begin_both)
    monkeypatch.setattr(store, "delete", delete_and_finish)
    holdfast.save("memory:", state(1))

    assert theirs
    assert [] == list(store.list("shard-00001"))


def test_a_save_that_is_refused_leaves_another_one_alone(store):
    holdfast.save("memory:", state(1))
    begun = store.begin("shard-00000-of-00001.safetensors", 1, PART_BYTES)
    with pytest.raises(AlreadyExistsError):
        holdfast.save("memory:", state(2))
    with pytest.raises(InvalidRequestError, match="notes are not"):
        holdfast.save("memory:", state(2), overwrite=True, notes={"x": float("nan")})

    assert [begun.id] == [upload.id for upload in store.open_uploads()]


@pytest.mark.parametrize("whole", [False, True])
def test_a_segment_replaced_after_the_manifest_takes_the_manifest_with_it(
    store, monkeypatch, whole
):
    """Defect C2: the last look; a manifest that speaks of another save's segment is none.

    That of a ``whole`` save, which has replaced ours too, is left alone.
    """
    plain = MemoryStore.put

    def overtaken(key, data, *, if_absent=False):
        etag = plain(store, key, data, if_absent=if_absent)
        if key == "manifest.json":
            store._objects.update(theirs)
        return etag

    holdfast.save("memory:", state(2))
    theirs = dict(store._objects)
    if not whole:
        del theirs["manifest.json"]
    store._objects.clear()
    monkeypatch.setattr(store, "put", overtaken)
    with pytest.raises(ConflictError, match="another save is writing"):
        holdfast.save("memory:", state(1))

    assert readable() == (2 if whole else None)


def test_a_lost_answer_of_the_manifest_is_read_back_and_is_success(store):
    store.lose_answer_of = "manifest.json"
    holdfast.save("memory:", state(1))

    assert 1 == readable()


def test_a_manifest_that_somebody_else_wrote_meanwhile_is_no_success(store, monkeypatch):
    other = Faulty()
    with monkeypatch.context() as patch:
        patch.setattr(writing, "open_store", lambda path, *, make=False: other)
        holdfast.save("memory:", state(7))
    theirs = other.get("manifest.json", length_bytes_max=1 << 20)
    plain = MemoryStore.put

    def race(key, data, *, if_absent=False):
        if key == "manifest.json" and key not in store._objects:
            plain(store, key, theirs)
        return plain(store, key, data, if_absent=if_absent)

    monkeypatch.setattr(store, "put", race)
    with pytest.raises(AlreadyExistsError):
        holdfast.save("memory:", state(1))


class Copied(TorchDispatchMode):
    """Notes the most elements that one operation has copied into new memory."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "_unsafe_view", "contiguous"):
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t.t()[None], lambda t: t[:, ::2], lambda t: t.t().conj(),
     lambda t: t.view(8, 8, 64).permute(1, 2, 0), lambda t: t[3:, 5:].expand(2, 61, 59)],
    ids=["turned", "one", "strided", "conj", "deep", "expanded"],
)  # fmt: skip
def test_a_part_of_a_tensor_that_lies_otherwise_costs_no_copy_of_all_of_it(view):
    """F73: a parameter of 8 GiB in column order has 512 parts, and 4 are made at once."""
    source = view(torch.randn(64, 64, dtype=torch.complex64))
    wanted = source.contiguous().resolve_conj().reshape(-1)
    for first, last in [(0, 5), (60, 190), (300, 301), (source.numel() - 3, source.numel())]:
        target = torch.zeros(8 * (last - first), dtype=torch.uint8)
        with Copied() as copied:
            sending._copy(target, source, 8 * first, 8 * last)

        assert torch.equal(wanted[first:last], target.view(torch.complex64))
        assert copied.most <= 600


def test_a_failed_upload_is_aborted_and_the_store_is_given_back(store, monkeypatch):
    def refuse(*_):
        raise UnavailableError("503")

    monkeypatch.setattr(MemoryStore, "put_part", refuse)
    with pytest.raises(UnavailableError, match="503"):
        holdfast.save("memory:", state(1))

    assert [] == list(store.open_uploads())
    assert 1 == store.closed


def test_memory_is_bounded_by_parts_whatever_the_segment(store, monkeypatch):
    """F73: no buffer is longer than a part, and no more are held than the window has."""
    made, lengths = [], []
    plain, new = MemoryStore.read_into, parts.np.empty

    def watched(self, key, begin, view):
        lengths.append(len(view.obj))
        plain(self, key, begin, view)

    def make(length, **options):
        made.append(length)
        return new(length, **options)

    monkeypatch.setattr(MemoryStore, "read_into", watched)
    big = {"model": torch.nn.Linear(14 * PART_BYTES // 4, 1)}
    holdfast.save("memory:", big)
    target = {"model": torch.nn.Linear(14 * PART_BYTES // 4, 1)}
    monkeypatch.setattr(parts.np, "empty", make)
    holdfast.load("memory:", target)

    assert torch.equal(big["model"].weight, target["model"].weight)
    assert PART_BYTES == max(lengths)
    assert made.count(PART_BYTES) <= parts.WINDOW_PARTS_COUNT_MIN + 1, "buffers are used again"
