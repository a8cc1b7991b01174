"""Writes to frozen tensors that torch does not tell of are found by the bytes, at the next save."""

from __future__ import annotations

import pytest
import torch
from tests.late_device import LateDevice
from tests.unit.snapshot.test_frozen import LAYERS, SIZE, Trainer, weight
from tests.unit.snapshot.test_layout import adapted
from tests.unit.state import worlds
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.copying.copiers import Copiers
from holdfast.snapshot.frozen_pieces import is_watched
from holdfast.snapshot.second_look import STRIP_BYTES_MAX, changed_unseen, strip_of
from holdfast.state.capture import Capture


@pytest.fixture
def trainer(tmp_path):
    model, optimizer, state = adapted(LAYERS, size=SIZE)
    holdfast.frozen(model)
    made = Trainer(tmp_path, state, optimizer)
    yield made
    assert made.engine.close(worlds.WAIT_S)
    for buffer in made.buffers.values():
        buffer.drop()


def merge_and_unmerge(tensor):
    """As a library for adapters does around an evaluation: what comes back is rounded."""
    learnt = torch.full_like(tensor, 1e3).div_(3)
    tensor.data += learnt
    tensor.data -= learnt


def step_fused(tensor):
    """It learns for a while between two saves, and no autograd counts what a fused kernel does."""
    tensor.requires_grad_()
    tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], fused=True).step()
    tensor.grad = None
    tensor.requires_grad_(requires_grad=False)


def write_memory(tensor):
    tensor.detach().numpy()[:] += 1


def write_twin(tensor):
    """Another parameter of the same memory has another count."""
    with torch.no_grad():
        nn.Parameter(tensor.data).add_(1)


UNSEEN = [merge_and_unmerge, step_fused, write_memory, write_twin]


@pytest.mark.parametrize("change", UNSEEN, ids=lambda change: change.__name__)
def test_what_changes_unseen_once_all_slots_have_it_is_in_no_save(trainer, change):
    """It costs the one save that finds it; a restore never gets what training did not have."""
    trainer.save("s1")
    trainer.save("s2")
    version = weight(trainer)._version
    change(weight(trainer))
    assert version == weight(trainer)._version  # else another test has it

    trainer.lease_again("s1")
    failed = trainer.save("s1")
    assert "'m.1.base.weight' and maybe more have changed unseen" in failed.reason
    for slot in ("s1", "s2"):
        if slot == "s2":
            trainer.lease_again(slot)
        assert trainer.save(slot).copied
        trainer.check(slot)
    [named] = trainer.capture.surprises
    assert "'m.1.base.weight' was declared frozen and has changed unseen" in named
    assert {"m.0.base.weight", "m.2.base.weight"} == {
        piece.entry.spec.fqn for piece in trainer.plan.frozen.pieces
    }


def test_of_many_that_changed_alike_people_hear_one_sentence(trainer):
    """A merge writes hundreds of them."""
    trainer.save("s1")
    for layer in trainer.state["m"]:
        layer.base.weight.data += 1
    trainer.lease_again("s1")
    trainer.save("s1")

    [said] = trainer.capture.surprises
    assert said.startswith("tensor 'm.0.base.weight' was declared frozen and has changed unseen")
    assert said.endswith("; so it is with 2 more, such as 'm.1.base.weight'")


def test_what_a_collective_writes_is_found(trainer, tmp_path):
    """A model that is compared with gets the weights of the one that learns, now and then."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer.save("s1")
        trainer.save("s2")
        sent = weight(trainer).detach()
        dist.all_reduce(sent.add_(1), dist.ReduceOp.SUM)
        trainer.lease_again("s1")
        trainer.save("s1")
        trainer.check("s1")
    finally:
        dist.destroy_process_group()


def test_what_rotted_where_one_looks_again_is_mended_and_believed(trainer):
    """The strip is right then, and so is the rest: nothing has changed in training."""
    trainer.save("s1")
    trainer.lease_again("s1")
    begin, _ = trainer.plan.frozen.spans[0]
    path = next(trainer.folder.glob("s1.*.open"))
    with path.open("r+b") as file:
        file.seek(begin + 100)
        file.write(b"\x55")

    assert trainer.save("s1").copied
    trainer.check("s1")
    assert [] == list(trainer.capture.surprises)


def test_a_look_that_fails_costs_one_save(trainer, monkeypatch):
    """The copy thread goes on, whatever happens there."""
    trainer.save("s1")
    trainer.lease_again("s1")

    def broken(*_):
        raise ValueError("what nobody expects")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.snapshot.engine.changed_unseen", broken)
        assert "copy failed: what nobody expects" in trainer.save("s1").reason
    assert trainer.save("s1").copied
    trainer.check("s1")


def enlarge(tensor):
    tensor.data = torch.zeros(SIZE + 1, SIZE)


def free(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [enlarge, free], ids=lambda change: change.__name__)
def test_what_goes_while_one_looks_is_left_to_the_next_save(trainer, change):
    """Training goes on meanwhile; who read freed memory would end the process."""
    trainer.save("s1")
    trainer.lease_again("s1")
    change(weight(trainer))

    assert [] == changed_unseen(trainer.plan, trainer.buffers["s1"], Copiers())
    assert not trainer.plan.is_current()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3), (1, 40), (3, 5, 4), (2, 1, 9, 2)])
@pytest.mark.parametrize("bytes_max", [4, 10, 24, 1000])
def test_strips_are_short_and_in_time_all_of_a_tensor(shape, bytes_max):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    seen = set()
    for turn in range(64):
        strip = strip_of(tensor, turn, bytes_max)
        assert strip.nbytes <= bytes_max
        assert strip.is_contiguous()
        seen.update(strip.reshape(-1).tolist())

    assert set(range(tensor.numel())) == seen


def test_of_long_tensors_another_strip_is_looked_at_each_time(tmp_path):
    """Of a write that spares the first strip it is known in time."""
    model = nn.Linear(1, 3 * STRIP_BYTES_MAX // 4, bias=False).requires_grad_(requires_grad=False)
    holdfast.frozen(model)
    trainer = Trainer(tmp_path, {"m": model})
    trainer.save("s1")
    model.weight.data[-1] += 1
    kept = []
    while True:
        trainer.lease_again("s1")
        snapshot = trainer.save("s1")
        if not snapshot.copied:
            break
        kept.append(snapshot)

    assert 2 == len(kept)
    assert "have changed unseen" in snapshot.reason


def test_of_many_tensors_some_are_looked_at_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.snapshot.second_look.STRIPS_MAX", 2)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(5)))
    holdfast.frozen(model.requires_grad_(requires_grad=False))
    trainer = Trainer(tmp_path, {"m": model})
    trainer.save("s1")
    model[4].weight.data += 1
    reasons = []
    while not any(reasons):
        trainer.lease_again("s1")
        reasons.append(trainer.save("s1").reason)

    assert len(reasons) <= 3
    assert "'m.4.weight'" in reasons[-1]


# ------------------------------------------------------------------------------------- meshes


def write_dtensor(model):
    with torch.no_grad():
        model[0].weight.add_(1)


def write_local(model):
    with torch.no_grad():
        model[0].weight.to_local().add_(1)


def load(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [write_dtensor, write_local, load], ids=lambda c: c.__name__)
def test_a_write_to_a_sharded_parameter_is_seen_before_the_save(tmp_path, change):
    """Torch counts it at the DTensor, or at what is in it: never at both."""
    with worlds.becoming() as become:
        become(1, 2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(requires_grad=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        holdfast.frozen(model)
        capture = Capture({"m": model}, rank=1, world_size=2)
        plan = worlds.plan_of(capture)
        assert 2 == len(plan.frozen.pieces)
        assert plan.is_current()
        change(model)

        assert not plan.is_current()
        assert any("'m.0.weight' was declared frozen" in text for text in capture.surprises)


def test_a_sharded_parameter_that_no_optimizer_has_learns_from_its_requires_grad_on():
    with worlds.becoming() as become:
        become(1, 2)
        model = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        holdfast.frozen(model)
        capture = Capture({"m": model}, rank=1, world_size=2)
        plan = worlds.plan_of(capture)
        model.weight.requires_grad_()
        assert not plan.is_current()

        [piece] = worlds.plan_of(capture).frozen.pieces
        assert "m.bias" == piece.entry.spec.fqn
        assert [] == list(capture.surprises)


def test_what_is_sharded_in_inference_mode_is_not_watched():
    """Torch counts no writes to such a DTensor, though it may to what is in it."""
    with torch.inference_mode():
        outer = torch.zeros(1)

    assert is_watched(torch.zeros(1))
    assert not is_watched(torch.zeros(1), outer)


# -------------------------------------------------------------------------------- accelerators


def on_device(folder, device, values):
    model = nn.Module()
    model.weight = nn.Parameter(device.place(values), requires_grad=False)
    holdfast.frozen(model)
    trainer = Trainer(folder, {"m": model}, devices=device)
    return model, trainer


def test_memory_of_a_device_that_the_script_lets_go_is_free(tmp_path):
    """Weights that are taken off the device between two saves make room for something else."""
    device = LateDevice()
    model, trainer = on_device(tmp_path, device, torch.full((64, 64), 3.0))
    snapshot = trainer.save("s1")
    assert [] == [*trainer.plan.frozen._held, *snapshot.held]

    model.weight.data = torch.full((64, 64), 3.0)
    assert not trainer.plan.is_current()


@pytest.mark.parametrize("order", ["training first", "copies first", "at random"])
def test_what_changes_unseen_on_a_device_is_found_there(tmp_path, order):
    device = LateDevice(order)
    model, trainer = on_device(tmp_path, device, torch.full((64, 64), 3.0))
    trainer.save("s1")
    trainer.lease_again("s1")
    assert trainer.save("s1").copied
    device.launch(lambda raw: raw.add_(1), model.weight.data)
    device.finish()
    trainer.lease_again("s1")

    assert "'m.weight' and maybe more have changed unseen" in trainer.save("s1").reason
    assert [] == device.faults


def test_a_device_that_fails_while_one_looks_costs_one_save(tmp_path):
    device = LateDevice()
    model, trainer = on_device(tmp_path, device, torch.full((64, 64), 3.0))
    model.register_buffer("table", device.place(torch.ones(3)))
    trainer.save("s1")
    trainer.lease_again("s1")
    device.fail_copy = (device.copies_count + 1, RuntimeError("out of memory"))

    assert "copy failed: out of memory" in trainer.save("s1").reason
    assert not trainer.engine._copiers.under_way  # the slot is anybody's now
    assert trainer.save("s1").copied
    trainer.check("s1")
