"""Plan, buffer, engine and gate, on real files and threads."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.state import worlds
from torch import nn

from holdfast.core.session import SlotLease
from holdfast.errors import ConflictError, NotFoundError, PreconditionError, TruncatedShardError
from holdfast.format.boxes import Box
from holdfast.format.segment import TensorSpec
from holdfast.snapshot import plan as plan_rules
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import CopyEngine
from holdfast.snapshot.optimizer_gate import Gate
from holdfast.snapshot.plan import balance
from holdfast.state.capture import Capture
from holdfast.threads import limit_this_thread


def trained() -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer, {"m": model, "o": optimizer, "x": {"n": 0}}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


def identity_changes() -> dict:
    def reload_optimizer(state):
        state["o"].load_state_dict(copy.deepcopy(state["o"].state_dict()))

    def replace(state):
        state["m"][0].weight = nn.Parameter(torch.zeros(4, 4))

    def add_group(state):
        state["o"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def lose_state(state):
        state["o"].state.pop(state["m"][0].weight)

    def add_key(state):
        state["more"] = {"t": torch.zeros(3)}

    def swap_object(state):
        state["m"] = nn.Sequential(*state["m"])

    def add_module(state):
        state["m"].append(nn.Linear(4, 4))

    def grow_blob(state):
        state["x"]["text"] = "x" * 100_000

    return {f.__name__: f for f in (reload_optimizer, replace, add_group, lose_state, add_key,
                                    swap_object, add_module, grow_blob)}  # fmt: skip


def tensor_changes() -> dict:
    def freeze(state):
        state["m"][0].weight.requires_grad_(requires_grad=False)

    def shrink(state):
        state["m"][0].weight.data = state["m"][0].weight.data[:2]

    def halve(state):
        state["m"][0].weight.data = state["m"][0].weight.data.half()

    return {f.__name__: f for f in (freeze, shrink, halve)}


CHANGES = identity_changes() | tensor_changes()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_structure_makes_the_plan_stale(change):
    """F36."""
    state = trained()[2]
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    assert plan.is_current()
    change(state)

    assert not plan.is_current()


def test_training_on_and_plain_data_leave_the_plan_as_it_is():
    """F36: and lazily made state does not."""
    model, optimizer, state = trained()
    capture = Capture(state, rank=0, world_size=1)
    plan = worlds.plan_of(capture)
    step(model, optimizer)
    state["x"]["n"] = 12_345

    assert plan.is_current()
    assert plan.plan_hash == worlds.plan_of(capture).plan_hash
    fresh = torch.optim.AdamW(model.parameters())
    early = worlds.plan_of(other := Capture({"m": model, "o": fresh}, rank=0, world_size=1))
    step(model, fresh)
    assert not early.is_current()
    assert early.plan_hash != worlds.plan_of(other).plan_hash


def test_only_what_an_optimizer_alone_writes_is_deferred():
    state = trained()[2]
    state["frozen"] = nn.Linear(2, 2)
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    deferred = {piece.entry.spec.fqn for piece in plan.deferred}
    eager = {piece.entry.spec.fqn for piece in plan.eager}

    assert {"m.0.weight", "o.state.m.0.weight.exp_avg", "o.state.m.1.bias.step"} <= deferred
    assert eager == {
        "m.1.running_mean",
        "m.1.running_var",
        "m.1.num_batches_tracked",
        "frozen.weight",
        "frozen.bias",
    }


def test_replicated_tensors_are_balanced_by_bytes_and_saved_once():
    """F37."""
    sizes = [(f"t{i}", 1 + i * i % 97) for i in range(200)]
    owners = balance(sizes, [500, 0, 0])
    loads = [500, 0, 0]
    for name, length_bytes in sizes:
        loads[owners[name]] += length_bytes

    assert owners == balance(sizes[::-1], [500, 0, 0])
    assert max(loads) - min(loads) <= 97


def test_two_cuts_of_one_tensor_are_two_plans():
    """Defect X14: the lengths of boxes count, and where they begin."""

    def plan_hash(offset: int, length: int) -> str:
        box = Box((offset, 0), (length, 4))
        spec = TensorSpec(fqn="w", dtype="F32", shape=(4, 4), box=box)
        return plan_rules.hash_of([spec], 0, 2)

    assert len({plan_hash(0, 2), plan_hash(0, 3), plan_hash(1, 2)}) == 3


def begin(tmp_path, state, *, defer=True, hold=None):
    """Begin one save; with ``hold`` the copy thread waits for that event before each chunk."""
    done = threading.Event()
    engine = CopyEngine(lambda _: done.set())
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    lease = worlds.make_slot(tmp_path, "s1", plan.length_bytes)
    buffer = SlotBuffer.open(tmp_path, lease)
    if hold is not None:
        plan.chunks = HeldChunks(plan.chunks, hold)
    return engine, plan, buffer, engine.begin(plan, buffer, step=1, generation=1, defer=defer), done


class HeldChunks(list):
    def __init__(self, chunks, hold):
        super().__init__(chunks)
        self.hold = hold

    def __iter__(self):
        for chunk in list.__iter__(self):
            assert self.hold.wait(worlds.WAIT_S)
            yield chunk


def test_the_gate_holds_the_step_until_the_copy_has_ended(tmp_path):
    """F26: what is saved is the state of the step, though training went on at once."""
    model, optimizer, state = trained()
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    gate = Gate(engine, gate_s_max=worlds.WAIT_S)
    before = model[0].weight.detach().clone()
    stepping = threading.Thread(target=step, args=(model, optimizer))
    stepping.start()
    assert engine.busy
    assert torch.equal(before, model[0].weight)
    hold.set()
    stepping.join(worlds.WAIT_S)
    gate.uninstall()
    assert done.wait(worlds.WAIT_S)
    index = [p.entry.spec.fqn for p in plan.deferred].index("m.0.weight")

    assert snapshot.copied
    assert torch.equal(before, buffer.deferred(plan)[index])
    assert not torch.equal(before, model[0].weight)


def test_a_copy_that_hangs_costs_the_save_and_not_the_step(tmp_path):
    """P4."""
    model, optimizer, state = trained()
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    gate = Gate(engine, gate_s_max=0.05)
    step(model, optimizer)
    gate.uninstall()
    assert snapshot.abandoned
    with pytest.raises(PreconditionError, match="has not ended"):
        engine.begin(plan, buffer, step=2, generation=1)
    hold.set()
    assert done.wait(worlds.WAIT_S)

    assert not snapshot.copied
    assert "optimizer step" in snapshot.reason
    assert engine.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)


def test_deferral_is_trusted_only_after_every_optimizer_fired_between_two_saves():
    model, optimizer, _ = trained()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    gate = Gate(CopyEngine(lambda _: None))
    answers = [gate.trusts([optimizer, other])]
    step(model, optimizer)
    answers.append(gate.trusts([optimizer, other]))
    step(model, optimizer)
    other.step()
    answers.append(gate.trusts([optimizer, other]))
    answers.append(gate.trusts([optimizer, other]))
    count = gate.steps_count
    gate.uninstall()
    other.step()

    assert [False, False, True, True] == answers
    assert 3 == count == gate.steps_count


def test_a_hand_written_update_waits_at_the_explicit_gate(tmp_path):
    _, _, state = trained()
    hold = threading.Event()
    engine, *_, done = begin(tmp_path, state, hold=hold)
    gate = Gate(engine, gate_s_max=worlds.WAIT_S)
    waiting = threading.Thread(target=gate.before_update)
    waiting.start()
    assert waiting.is_alive()
    hold.set()
    waiting.join(worlds.WAIT_S)
    gate.uninstall()

    assert not waiting.is_alive()
    assert not engine.busy
    assert done.wait(worlds.WAIT_S)


@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_a_tensor_swapped_for_another_shape_before_a_save_is_refused(tmp_path, name, defer):
    """``.data =`` keeps the identity; the plan is stale from then on."""
    model, _, state = trained()
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s1", plan.length_bytes))
    model.state_dict(keep_vars=True)[name].data = torch.zeros(1)

    with pytest.raises(PreconditionError, match=f"'m.{name}' is"):
        CopyEngine(lambda _: None).begin(plan, buffer, step=1, generation=1, defer=defer)

    assert not plan.is_current()


def test_a_tensor_swapped_for_another_shape_after_a_save_is_saved_as_it_was(tmp_path):
    """Bit for bit; the next save needs another plan, this one has what it needs."""
    model, _, state = trained()
    before = model[0].weight.detach().clone()
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    model[0].weight.data = torch.zeros(2, 2)
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)

    assert snapshot.copied
    assert torch.equal(before, saved(plan, buffer, "m.0.weight"))
    assert not plan.is_current()


def saved(plan, buffer, fqn):
    """Return what the slot holds of a deferred or eager tensor."""
    eager = buffer.views(plan).eager
    for pieces, held in ((plan.deferred, buffer.deferred(plan)), (plan.eager, eager)):
        for piece, view in zip(pieces, held, strict=True):
            if piece.entry.spec.fqn == fqn:
                return view.clone()
    raise AssertionError(fqn)


def test_a_frozen_parameter_of_an_optimizer_is_copied_before_save_returns(tmp_path):
    """Bit for bit; defect A8: MoCo gives SGD all parameters and moves the key encoder itself."""
    model, _, _ = trained()
    key = model[0].weight.requires_grad_(requires_grad=False)
    state = {"m": model, "o": torch.optim.SGD(model.parameters())}
    before = key.clone()
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    key.mul_(0.5)
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)

    assert snapshot.copied
    assert torch.equal(before, saved(plan, buffer, "m.0.weight"))


def test_data_assigned_after_the_save_is_not_what_was_saved(tmp_path):
    """Bit for bit; defect A8: swapping an EMA in for evaluation, right after ``step``."""
    model, _, state = trained()
    weight = model[0].weight
    hold = threading.Event()
    engine, plan, buffer, snapshot, done = begin(tmp_path, state, hold=hold)
    trained_weight, before = weight.data, weight.detach().clone()
    weight.data = torch.full((4, 4), 7.0)
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert snapshot.copied
    assert torch.equal(before, saved(plan, buffer, "m.0.weight"))

    for now in (weight.data, trained_weight):  # the plan holds, and follows
        weight.data = now
        buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s2", plan.length_bytes))
        done.clear()
        assert plan.is_current()
        engine.begin(plan, buffer, step=2, generation=1)
        assert done.wait(worlds.WAIT_S)
        assert torch.equal(now, saved(plan, buffer, "m.0.weight"))
    assert engine.close(worlds.WAIT_S)


@pytest.mark.parametrize("turn", [torch.Tensor.t, torch.Tensor.conj], ids=["turned", "conjugate"])
def test_data_assigned_in_the_same_memory_is_saved_as_it_reads(turn):
    """Bit for bit; defect A8: address, size and shape stay, and the values are others."""
    weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) * torch.tensor(1 + 2j))
    state = {"m": nn.ParameterList([weight]), "o": torch.optim.SGD([weight])}
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    before = plan.sources()
    assert plan.is_current()
    assert plan.sources() is before
    weight.data = turn(weight.data)

    assert plan.is_current()
    assert torch.equal(weight, plan.sources()[0])


def test_a_parameter_written_behind_the_gate_costs_one_save(tmp_path):
    """Defect A8: code that writes a parameter that learns, past the gate, tears no checkpoint."""
    model, _, state = trained()
    hold = threading.Event()
    engine, plan, _, snapshot, done = begin(tmp_path, state, hold=hold)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    hold.set()
    assert done.wait(worlds.WAIT_S)
    assert engine.close(worlds.WAIT_S)

    assert snapshot.abandoned
    assert "m.0.weight" in snapshot.reason
    assert not plan.is_current()
    again = worlds.plan_of(plan.capture)
    assert "m.0.weight" in {piece.entry.spec.fqn for piece in again.eager}
    assert "m.0.bias" in {piece.entry.spec.fqn for piece in again.deferred}


def test_the_copy_thread_uses_one_core_and_leaves_the_others_alone():
    """F40."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    counts: dict[str, int] = {}

    def limited() -> None:
        counts["limited"] = limit_this_thread()

    def later() -> None:
        counts["later"] = torch.get_num_threads()

    for target in (limited, later):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join(worlds.WAIT_S)
    counts["own"] = torch.get_num_threads()
    torch.set_num_threads(before)

    assert {"limited": 1, "later": 2, "own": 2} == counts


TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked")
    else:
        print("free")
"""


def lock_seen_from_outside(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TRY_LOCK, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_a_slot_is_locked_while_it_is_written_and_reused_on_the_same_mapping(tmp_path):
    buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s1", 4096))
    assert "locked" == lock_seen_from_outside(tmp_path / "s1.1.open")
    buffer.write(0, b"first")
    buffer.close_slot()
    assert "free" == lock_seen_from_outside(tmp_path / "s1.1.closed")
    with pytest.raises(PreconditionError):
        buffer.write(0, b"late")
    (tmp_path / "s1.1.closed").rename(tmp_path / "s1.2.open")
    lease = SlotLease(slot="s1", incarnation=2, length_bytes=4096, plan_hash="")
    buffer.reuse(lease)
    buffer.write(0, b"again")

    assert "locked" == lock_seen_from_outside(tmp_path / "s1.2.open")
    assert b"again" == (tmp_path / "s1.2.open").read_bytes()[:5]
    buffer.drop()
    assert "free" == lock_seen_from_outside(tmp_path / "s1.2.open")


def test_a_slot_taken_away_is_noticed(tmp_path):
    buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s1", 4096))
    (tmp_path / "s1.1.open").unlink()
    with pytest.raises(NotFoundError, match=r"s1\.1\.open was taken away"):
        buffer.close_slot()
    lease = worlds.make_slot(tmp_path, "s1", 4096, incarnation=3)
    with pytest.raises(NotFoundError, match="another file"):
        buffer.reuse(lease)
    with pytest.raises(NotFoundError):
        SlotBuffer.open(tmp_path, SlotLease(slot="s2", incarnation=1, length_bytes=1, plan_hash=""))


def test_a_slot_of_another_length_or_behind_a_link_is_refused(tmp_path):
    """P9."""
    worlds.make_slot(tmp_path, "s1", 4096)
    with pytest.raises(TruncatedShardError, match="4096 bytes, not 8192"):
        SlotBuffer.open(
            tmp_path, SlotLease(slot="s1", incarnation=1, length_bytes=8192, plan_hash="")
        )
    (tmp_path / "s2.1.open").symlink_to(tmp_path / "s1.1.open")
    with pytest.raises(OSError, match="symbolic links"):
        SlotBuffer.open(
            tmp_path, SlotLease(slot="s2", incarnation=1, length_bytes=4096, plan_hash="")
        )


def test_a_slot_that_another_process_holds_is_refused(tmp_path):
    lease = worlds.make_slot(tmp_path, "s1", 4096)
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'r+b'); fcntl.lockf(f, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "s1.1.open"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert b"held\n" == holder.stdout.readline()
        with pytest.raises(ConflictError):
            SlotBuffer.open(tmp_path, lease)
        holder.stdin.close()
        holder.wait(worlds.WAIT_S)
    SlotBuffer.open(tmp_path, lease).drop()


def test_the_header_is_whole_again_after_somebody_else_used_the_slot(tmp_path):
    """Between two leases a slot may hold a peer's copy: only consecutive ones trust the header."""
    state = trained()[2]
    plan = worlds.plan_of(Capture(state, rank=0, world_size=1))
    engine = CopyEngine(lambda snapshot: snapshot.buffer.close_slot())
    buffer = SlotBuffer.open(tmp_path, worlds.make_slot(tmp_path, "s1", plan.length_bytes))
    engine.begin(plan, buffer, step=1, generation=1, defer=False)
    for incarnation, before in ((2, 1), (7, 2)):
        path = tmp_path / f"s1.{before}.closed"
        if incarnation == 7:
            with path.open("r+b") as file:
                file.write(b"\xff" * plan.length_bytes)
        path.rename(tmp_path / f"s1.{incarnation}.open")
        buffer.reuse(SlotLease(slot="s1", incarnation=incarnation,
                               length_bytes=plan.length_bytes, plan_hash=""))  # fmt: skip
        assert plan.is_current()
        engine.begin(plan, buffer, step=incarnation, generation=3, parent=(1, 1), defer=False)
        shard = worlds.shard_of(tmp_path / f"s1.{incarnation}.closed")

        assert (incarnation, 3) == (shard.id.step, shard.id.generation)
