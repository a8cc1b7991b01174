"""What is declared frozen is copied once into each slot, and never silently left stale."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.unit.snapshot.test_layout import adapted
from tests.unit.state import worlds
from torch import nn

import holdfast
from holdfast.copying.cuda import CUDA
from holdfast.core.session import SlotLease
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.format.segment import TensorEntry, blob_spec
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine
from holdfast.snapshot.frozen_pieces import FrozenPieces
from holdfast.snapshot.pieces import Piece, Run
from holdfast.state.capture import Capture

LAYERS, SIZE = 3, 32
BASE_BYTES = LAYERS * SIZE * SIZE * 4


class Trainer:
    """One rank with slots of its own, and the part that an agent plays for them."""

    def __init__(self, folder, state, optimizer=None, devices=CUDA):
        self.folder = folder
        self.devices = devices
        self.state = state
        self.optimizer = optimizer
        self.capture = Capture(state, rank=0, world_size=1)
        self.plan = None
        self.ended = threading.Event()
        self.engine = CopyEngine(lambda _: self.ended.set())
        self.buffers = {}
        self.step = 0

    def save(self, slot="s1", *, defer=True):
        """Save a step into a slot, as training does; return the snapshot."""
        if self.plan is None or not self.plan.is_current():
            self.plan = worlds.plan_of(self.capture, self.devices)
        buffer = self.buffers.get(slot)
        if buffer is None:
            lease = worlds.make_slot(self.folder, slot, self.plan.length_bytes)
            buffer = self.buffers[slot] = SlotBuffer.open(self.folder, lease)
        self.step += 1
        self.ended.clear()
        snapshot = self.engine.begin(self.plan, buffer, step=self.step, generation=1, defer=defer)
        assert self.ended.wait(worlds.WAIT_S)
        assert self.engine.wait(worlds.WAIT_S)
        if snapshot.copied:
            buffer.close_slot()
        return snapshot

    def lease_again(self, slot="s1", *, grown=1):
        """Free the slot that was saved into, and lease it again."""
        buffer = self.buffers[slot]
        incarnation = buffer.incarnation + grown
        closed = self.folder / f"{slot}.{buffer.incarnation}.closed"
        closed.rename(self.folder / f"{slot}.{incarnation}.open")
        buffer.reuse(
            SlotLease(
                slot=slot,
                incarnation=incarnation,
                length_bytes=buffer.length_bytes,
                plan_hash="",
            )
        )

    def bytes_of(self, slot="s1"):
        """Return all that was saved there, and of that each tensor by name."""
        name = f"{slot}.{self.buffers[slot].incarnation}.closed"
        data = bytearray((self.folder / name).read_bytes())
        found = {}
        for piece in self.plan.pieces:
            spec, begin, end = piece.entry
            flat = torch.frombuffer(
                data,
                dtype=piece.tensor.dtype,
                count=(end - begin) // piece.tensor.element_size(),
                offset=begin,
            )
            found[spec.fqn] = flat.view(spec.box.lengths)
        return found

    def check(self, slot="s1"):
        """See that a slot has the state as it is, bit for bit."""
        found = self.bytes_of(slot)
        assert found.keys() == {piece.entry.spec.fqn for piece in self.plan.pieces}
        for piece in self.plan.pieces:
            assert torch.equal(piece.tensor, found[piece.entry.spec.fqn]), piece.entry.spec.fqn


@pytest.fixture
def trainer(tmp_path):
    model, optimizer, state = adapted(LAYERS, size=SIZE)
    holdfast.frozen(model)
    made = Trainer(tmp_path, state, optimizer)
    yield made
    assert made.engine.close(worlds.WAIT_S)
    for buffer in made.buffers.values():
        buffer.drop()


def train(trainer):
    for p in trainer.optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()


@pytest.mark.parametrize("defer", [True, False])
def test_each_slot_gets_it_once_and_every_save_is_whole(trainer, defer):
    """G16: by bytes copied; both slots are what training has, bit for bit."""
    kept = []
    for round_number in range(3):
        for slot in ("s1", "s2"):
            if round_number:
                trainer.lease_again(slot)
            train(trainer)
            kept.append(trainer.save(slot, defer=defer).kept_bytes)
            trainer.check(slot)

    assert [0, 0, *[BASE_BYTES] * 4] == kept


def test_without_a_declaration_all_of_it_is_copied_each_time(tmp_path):
    _, optimizer, state = adapted(LAYERS, size=SIZE)
    trainer = Trainer(tmp_path, state, optimizer)
    trainer.save()
    trainer.lease_again()

    assert 0 == trainer.save().kept_bytes
    assert [] == list(trainer.plan.frozen.pieces)


def weight(trainer):
    return trainer.state["m"][1].base.weight


def write(trainer):
    weight(trainer).add_(1)


def write_a_view(trainer):
    weight(trainer).detach()[0, 0] = 7.0


def write_in_inference_mode(trainer):
    with torch.inference_mode():
        weight(trainer).mul_(2)


def assign_data(trainer):
    weight(trainer).data = torch.full((SIZE, SIZE), 3.0)


def assign_data_twice(trainer):
    """The second memory may lie where the first did, unless that is held."""
    weight(trainer).data = torch.full((SIZE, SIZE), 4.0)
    weight(trainer).data = torch.full((SIZE, SIZE), 5.0)


def load(trainer):
    other, _, _ = adapted(LAYERS, size=SIZE)
    trainer.state["m"].load_state_dict(other.state_dict())


CHANGES = [write, write_a_view, write_in_inference_mode, assign_data, assign_data_twice, load]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_changed_all_the_same_is_copied_and_named_once(trainer, change):
    """A wrong declaration costs bytes and never a stale checkpoint, where torch can tell."""
    trainer.save("s1")
    trainer.save("s2")
    hash_before = trainer.plan.plan_hash
    change(trainer)

    for slot in ("s1", "s2"):
        trainer.lease_again(slot)
        trainer.save(slot)
        trainer.check(slot)
    trainer.lease_again("s1")
    kept = trainer.save("s1").kept_bytes

    named = [text for text in trainer.capture.surprises if "'m.1.base.weight'" in text]
    assert 1 == len(named)
    assert "declared frozen and has changed" in named[0]
    assert kept == (0 if change is load else BASE_BYTES * 2 // 3)  # the others stay frozen
    assert hash_before == trainer.plan.plan_hash  # slots of the plan are leased on


def test_what_is_written_unseen_between_the_first_two_saves_is_found(trainer):
    """MoCo as published: the key encoder is moved through ``.data`` at each step."""
    trainer.save("s1")
    weight(trainer).data.mul_(2)
    trainer.save("s2")
    trainer.check("s2")
    assert not trainer.plan.is_current()
    trainer.lease_again("s1")
    trainer.save("s1")

    trainer.check("s1")
    assert any("'m.1.base.weight'" in text for text in trainer.capture.surprises)
    assert all("changed unseen" in text for text in trainer.capture.surprises)


def test_what_takes_the_place_of_a_frozen_tensor_is_copied_and_named(trainer):
    trainer.save("s1")
    fresh = torch.full((SIZE, SIZE), 9.0)
    trainer.state["m"][1].base.weight = nn.Parameter(fresh, requires_grad=False)
    trainer.lease_again("s1")
    trainer.save("s1")

    trainer.check("s1")
    [named] = trainer.capture.surprises
    assert "'m.1.base.weight' was declared frozen and was replaced" in named


def test_what_is_to_learn_is_frozen_no_more(trainer):
    """``requires_grad_`` takes the declaration back, without a warning."""
    trainer.save("s1")
    weight(trainer).requires_grad_()
    trainer.optimizer.add_param_group({"params": [weight(trainer)]})
    train(trainer)
    assert not trainer.plan.is_current()
    trainer.plan = worlds.plan_of(trainer.capture)
    frozen = {piece.entry.spec.fqn for piece in trainer.plan.frozen.pieces}

    assert {"m.0.base.weight", "m.2.base.weight"} == frozen
    assert [] == list(trainer.capture.surprises)


def test_a_parameter_that_no_optimizer_has_learns_from_its_requires_grad_on(trainer):
    trainer.save("s1")
    weight(trainer).requires_grad_()

    assert not trainer.plan.is_current()


@pytest.mark.parametrize("grown", [2, 3])
def test_a_slot_that_somebody_else_had_meanwhile_gets_all_of_it(trainer, grown):
    trainer.save("s1")
    trainer.lease_again("s1", grown=grown)

    assert 0 == trainer.save("s1").kept_bytes
    trainer.check("s1")


def test_what_rots_in_a_slot_costs_one_save_and_is_in_none(trainer, monkeypatch):
    """What was verified once and is not copied again is hashed before each seal."""
    monkeypatch.setattr("holdfast.snapshot.second_look.STRIP_BYTES_MAX", 16)
    trainer.save("s1")
    trainer.lease_again("s1")
    begin, _ = trainer.plan.frozen.spans[0]
    path = next(trainer.folder.glob("s1.*.open"))
    with path.open("r+b") as file:
        file.seek(begin + 100)
        file.write(b"\x55")

    failed = trainer.save("s1")
    assert "bytes of frozen tensors have changed in slot s1" in failed.reason
    assert 0 == trainer.save("s1").kept_bytes
    trainer.check("s1")


def test_what_has_another_size_by_the_time_of_the_copy_is_refused(trainer):
    """Its place is too short for it."""
    trainer.plan = worlds.plan_of(trainer.capture)
    lease = worlds.make_slot(trainer.folder, "s1", trainer.plan.length_bytes)
    trainer.buffers["s1"] = buffer = SlotBuffer.open(trainer.folder, lease)
    weight(trainer).data = torch.zeros(SIZE + 1, SIZE)

    with pytest.raises(PreconditionError, match=r"'m\.1\.base\.weight' is"):
        trainer.engine.begin(trainer.plan, buffer, step=1, generation=1)


def test_a_first_copy_that_is_given_up_leaves_nothing_to_rely_on(trainer):
    """It is not known what of it came."""
    held = threading.Event()
    trainer.plan = worlds.plan_of(trainer.capture)
    lease = worlds.make_slot(trainer.folder, "s1", trainer.plan.length_bytes)
    trainer.buffers["s1"] = buffer = SlotBuffer.open(trainer.folder, lease)
    trainer.plan.chunks = HeldChunks(trainer.plan.chunks, held)
    snapshot = trainer.engine.begin(trainer.plan, buffer, step=1, generation=1)
    trainer.engine.abandon("no time")
    held.set()
    assert trainer.ended.wait(worlds.WAIT_S)

    assert snapshot.abandoned
    assert not buffer.keeps(trainer.plan)
    assert 0 == trainer.save("s1").kept_bytes


class HeldChunks(list):
    def __init__(self, chunks, hold):
        super().__init__(chunks)
        self.hold = hold

    def __iter__(self):
        assert self.hold.wait(worlds.WAIT_S)
        return list.__iter__(self)


def test_the_gate_does_not_wait_for_the_look_at_what_is_kept(trainer, monkeypatch):
    """Training is held up by copies of what it writes, and by nothing else."""
    trainer.save("s1")
    trainer.lease_again("s1")
    looking, go_on = threading.Event(), threading.Event()
    check = SlotBuffer.check_kept

    def slow(buffer, plan):
        looking.set()
        assert go_on.wait(worlds.WAIT_S)
        return check(buffer, plan)

    monkeypatch.setattr(SlotBuffer, "check_kept", slow)
    buffer = trainer.buffers["s1"]
    trainer.ended.clear()
    snapshot = trainer.engine.begin(trainer.plan, buffer, step=2, generation=1)
    assert looking.wait(worlds.WAIT_S)

    assert trainer.engine.let_pass(0.0)
    assert not trainer.engine.busy
    assert not snapshot.copied
    go_on.set()
    assert trainer.ended.wait(worlds.WAIT_S)
    assert snapshot.copied


def test_statistics_of_a_batch_norm_are_never_frozen():
    """It writes them without a word to autograd."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(requires_grad=False)
    model.register_buffer("table", torch.zeros(3))
    holdfast.frozen(model)
    plan = worlds.plan_of(Capture({"m": model}, rank=0, world_size=1))
    frozen = {piece.entry.spec.fqn for piece in plan.frozen.pieces}

    assert {"m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias", "m.table"} == frozen
    before = model[1].running_mean._version
    model.train()(torch.randn(4, 2))
    assert before == model[1].running_mean._version  # else the rule is not needed any more


def test_tensors_whose_writes_torch_does_not_count_are_copied_each_time():
    with torch.inference_mode():
        model = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    holdfast.frozen(model)
    plan = worlds.plan_of(Capture({"m": model}, rank=0, world_size=1))

    assert [] == list(plan.frozen.pieces)
    assert {"m.weight", "m.bias"} == {piece.entry.spec.fqn for piece in plan.eager}


def test_a_declaration_after_the_first_save_counts_from_the_next(tmp_path):
    model, _, state = adapted(LAYERS, size=SIZE)
    plan = worlds.plan_of(capture := Capture(state, rank=0, world_size=1))
    assert plan.is_current()
    holdfast.frozen(model[0])

    assert not plan.is_current()
    [piece] = worlds.plan_of(capture).frozen.pieces
    assert "m.0.base.weight" == piece.entry.spec.fqn


def test_one_names_what_is_no_module():
    with pytest.raises(InvalidRequestError, match="takes a module, not a Parameter"):
        holdfast.frozen(nn.Parameter(torch.zeros(1)))


def test_a_checkpoint_by_path_has_what_is_frozen(tmp_path):
    """One-shot saves have no slots: all of it is written."""
    model, _, state = adapted(LAYERS, size=SIZE)
    holdfast.frozen(model)
    holdfast.save(tmp_path / "c", state)
    expected = model[2].base.weight.clone()
    model[2].base.weight.zero_()
    holdfast.load(tmp_path / "c", state)

    assert torch.equal(expected, model[2].base.weight)


def test_memory_that_was_let_go_and_given_out_again_is_not_taken_for_what_lay_there():
    """An address says nothing if the memory may have been freed in between."""
    weight = nn.Parameter(torch.zeros(1 << 18), requires_grad=False)
    entry = TensorEntry(blob_spec("w", weight.nbytes), 0, weight.nbytes)
    kind = weight.shape, weight.dtype
    pieces = FrozenPieces([Piece(weight, entry, kind)], [Run(None, 0, 1)], [None])
    assert [] == pieces.changed()
    for _ in range(8):
        weight.data = torch.ones(1 << 18)
        assert ["w"] == pieces.changed()


def test_a_slot_that_is_written_by_another_plan_keeps_nothing_of_the_first(trainer):
    trainer.save("s1")
    trainer.lease_again("s1")
    buffer, first = trainer.buffers["s1"], trainer.plan
    assert buffer.keeps(first)
    buffer.frozen(worlds.plan_of(trainer.capture))

    assert not buffer.keeps(first)
