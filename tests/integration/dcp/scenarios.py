"""What PyTorch's own tests of DCP check, with our storage, on four gloo ranks started once.

``python scenarios.py FOLDER RANK WORLD``. Each function here is a scenario and a row of
``docs/reference/dcp-scenarios.md``, which names the file of PyTorch that it comes from. Rank 0
prints ``ok <name>``; one that fails ends the process.
"""

from __future__ import annotations

import copy
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.e2e.mesh_trainer import build
from tests.integration.dcp.ranks import same, whole
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from holdfast.bucket.folder import CheckpointFolder
from holdfast.integrations.dcp import HoldfastReader, HoldfastStager, HoldfastWriter
from holdfast.objectstore.directory import DirectoryStore

WORLD = 4
PLACEMENTS = [
    [Shard(0)], [Replicate()], [Shard(1)], [Replicate(), Replicate()], [Replicate(), Shard(0)],
    [Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)],
]  # fmt: skip


def save(state: dict, folder: Path, writer: HoldfastWriter | None = None, **options: Any) -> None:
    """Save it there."""
    dcp.save(state, checkpoint_id=folder, storage_writer=writer or HoldfastWriter(), **options)


def load(state: dict, folder: Path, **options: Any) -> dict:
    """Load what is there into the state, and return it."""
    dcp.load(state, checkpoint_id=folder, storage_reader=HoldfastReader(), **options)
    return state


def mesh_for(placements: list) -> DeviceMesh:
    """Return a mesh of all ranks with so many axes."""
    return init_device_mesh("cpu", (WORLD,) if len(placements) == 1 else (2, 2))


def reshard(folder: Path) -> None:
    """Every placement on a line and on a grid is loaded as every other; rows do not divide."""
    full = torch.arange(42.0).view(6, 7)
    meshes = [mesh_for(placements) for placements in PLACEMENTS]
    cut = zip(meshes, PLACEMENTS, strict=True)
    state = {str(n): distribute_tensor(full + n, *at) for n, at in enumerate(cut)}
    save(state, folder)
    for shift in range(len(PLACEMENTS)):
        found = {}
        for n in range(len(PLACEMENTS)):
            at = (n + shift) % len(PLACEMENTS)
            found[str(n)] = zeros(6, 7, device_mesh=meshes[at], placements=PLACEMENTS[at])
        load(found, folder)
        assert all(torch.equal(whole(found[str(n)]), full + n) for n in range(len(PLACEMENTS)))


def empty_shards(folder: Path) -> None:
    """Some ranks have no row of a tensor of three."""
    mesh = mesh_for([Shard(0)])
    save({"t": distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])}, folder)
    found = load({"t": zeros(3, 2, device_mesh=mesh, placements=[Replicate()])}, folder)

    assert torch.equal(whole(found["t"]), torch.arange(6.0).view(3, 2))


def submeshes(folder: Path) -> None:
    """Tensors on two of the ranks, under names that the others lack or hold nothing of."""
    halves = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    half = dist.get_rank() // 2
    full = torch.arange(5.0)
    state = {
        f"of{half}": distribute_tensor(full + half, halves[half], [Shard(0)]),
        "one": DTensor.from_local(
            full[: 3 if dist.get_rank() == 0 else 2] + 9, halves[0], [Shard(0)],
            run_check=False, shape=torch.Size([5]), stride=(1,),
        ),
    }  # fmt: skip
    save(state, folder)
    found = load({"of0": torch.zeros(5), "of1": torch.zeros(5), "one": torch.zeros(5)}, folder)

    assert torch.equal(found["of0"], full)
    assert torch.equal(found["of1"], full + 1)
    assert torch.equal(found["one"][:3], full[:3] + 9)


def trained(kind: str, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer on a mesh; the same values on each."""
    if kind in ("ddp", "plain"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        )
        model = DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    else:
        model, optimizer = build(kind)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make one step, of the same data on all ranks."""
    torch.manual_seed(step)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the state under names that are the same on each mesh."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def put(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Set what was loaded."""
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def train_on(folder: Path) -> None:
    """FSDP2, HSDP, DDP, FSDP2 with TP: after a load, the next step has the same bits."""
    for kind in ("fsdp", "hsdp", "ddp", "2d"):
        model, optimizer = trained(kind)
        save(state_of(model, optimizer), folder / kind)
        other, its = trained(kind, steps=1)
        put(other, its, load(state_of(other, its), folder / kind))
        train(model, optimizer, 5)
        train(other, its, 5)
        assert same(whole(state_of(model, optimizer)), whole(state_of(other, its))), kind


def change_parallelism(folder: Path) -> None:
    """HSDP <-> FSDP, TP -> FSDP+TP, FSDP <-> DDP, and to no mesh at all."""
    for before, after in (
        ("hsdp", "fsdp"), ("fsdp", "hsdp"), ("tp", "2d"), ("ddp", "fsdp"), ("2d", "plain"),
        ("fsdp", "ddp"),
    ):  # fmt: skip
        model, optimizer = trained(before)
        save(state_of(model, optimizer), folder)
        other, its = trained(after, steps=1)
        put(other, its, load(state_of(other, its), folder))
        assert same(whole(state_of(model, optimizer)), whole(state_of(other, its))), (before, after)


def pipeline(folder: Path) -> None:
    """Each rank saves a stage under names of the whole model; FSDP2 loads all of it."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(WORLD)])
    rank = dist.get_rank()
    prefix = f"{rank}."
    of_stage = {
        key: torch.full_like(value, rank + 1.0)
        for key, value in layers.state_dict().items()
        if key.startswith(prefix)
    }
    save({"model": of_stage}, folder)
    fully_shard(layers, mesh=mesh_for([Shard(0)]))
    found = load({"model": layers.state_dict()}, folder)

    assert all((whole(v) == int(key[0]) + 1).all() for key, v in found["model"].items())


def experts(folder: Path) -> None:
    """Experts are sharded over the ranks that have them; the rest over all."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]
    expert = torch.arange(6.0).view(3, 2)
    key = f"experts.{rank % 2}"

    def state(scale: float) -> dict:
        mine = distribute_tensor(expert * scale * (1 + rank % 2), meshes[rank % 2], [Shard(0)])
        rest = distribute_tensor(expert * scale, mesh_for([Shard(0)]), [Shard(0)])
        return {key: mine, "net": rest}

    expected, found = state(1.0), state(0.0)
    save(expected, folder)
    load(found, folder)

    assert torch.equal(found[key].to_local(), expected[key].to_local())
    assert torch.equal(found["net"].to_local(), expected["net"].to_local())


def fine_tune(folder: Path) -> None:
    """A new head on a loaded body: what is not in the checkpoint keeps its values."""
    model, optimizer = trained("fsdp")
    save(state_of(model, optimizer), folder)
    body, _ = trained("fsdp", steps=0)
    state = {"model": {**body.state_dict(), "head.weight": torch.ones(2, 3)}}
    with pytest.raises(CheckpointException, match=r"head\.weight"):
        load(copy.copy(state), folder)
    load(state, folder, planner=DefaultLoadPlanner(allow_partial_load=True))

    assert torch.equal(state["model"].pop("head.weight"), torch.ones(2, 3))
    assert same(whole(state["model"]), whole(model.state_dict()))


def partial_load(folder: Path) -> None:
    """The model alone, and keys without a state to load into."""
    model, optimizer = trained("fsdp")
    save(state_of(model, optimizer), folder)
    other, _ = trained("fsdp", steps=0)
    found = load({"model": other.state_dict()}, folder)
    of_keys = _load_state_dict_from_keys("optimizer.state", storage_reader=HoldfastReader(folder))

    assert same(whole(found["model"]), whole(model.state_dict()))
    expected = whole(state_of(model, optimizer)["optimizer"])
    assert same(of_keys["optimizer"]["state"], expected["state"])
    assert "param_groups" not in of_keys["optimizer"]


def optimizers(folder: Path) -> None:
    """An optimizer without state, with one, and frozen parameters of which it has none."""

    def half_frozen(make: Callable, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = trained("fsdp", steps=0)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optimizer = make(model.parameters())
        for step in range(steps):
            train(model, optimizer, step)
        return model, optimizer

    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    ):
        expected = state_of(*half_frozen(make, steps=1))
        found = state_of(*half_frozen(make, steps=2))
        assert not same(whole(expected), whole(found))
        save(expected, folder)
        load(found, folder)
        assert same(whole(expected), whole(found))


class Counter:
    """Stateful; its ``state_dict`` is collective."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((2,), value)
        self.loads_count = 0

    def state_dict(self) -> dict:
        """Return the state, and wait for the other ranks."""
        dist.barrier()
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        """Take it."""
        dist.barrier()
        self.value = state["value"]
        self.loads_count += 1


def key_order(folder: Path) -> None:
    """Ranks whose keys have another order do not wait for each other for ever."""
    names = ["a", "b", "c"]
    turned = names if dist.get_rank() else names[::-1]
    save({name: Counter(ord(name)) for name in names}, folder)
    found = load({name: Counter(0) for name in turned}, folder)

    assert all(found[name].value[0] == ord(name) for name in names)


def stateful(folder: Path) -> None:
    """A stateful object is loaded in place, once; a value is replaced; tensors are kept."""
    plain = torch.zeros(3)
    cut = zeros(6, device_mesh=mesh_for([Shard(0)]), placements=[Shard(0)])
    save({"s": Counter(5), "n": [1, {"a": 2}], "t": torch.ones(3), "d": cut + 1}, folder)
    counter = Counter(0)
    found = load({"s": counter, "n": [0, {"a": 0}], "t": plain, "d": cut}, folder)

    assert found["s"] is counter
    assert (counter.loads_count, counter.value[0]) == (1, 5)
    assert found["n"] == [1, {"a": 2}]
    assert torch.equal(plain, torch.ones(3))
    assert torch.equal(whole(cut), torch.ones(6))


def overwrite(folder: Path) -> None:
    """The same place twice, with other tensors."""
    save({"t": torch.zeros(3), "old": 1}, folder)
    save({"t": torch.ones(4)}, folder)

    assert torch.equal(load({"t": torch.zeros(4)}, folder)["t"], torch.ones(4))
    with pytest.raises(CheckpointException, match="old"):
        load({"old": 0}, folder)


def no_dist(folder: Path) -> None:
    """Each rank for itself, in the middle of a process group."""
    mine = folder / str(dist.get_rank())
    save({"n": dist.get_rank()}, mine, no_dist=True)

    assert load({"n": -1}, mine, no_dist=True) == {"n": dist.get_rank()}
    dist.barrier()


class Faulty:
    """Raises in one method on one rank, before it does anything."""

    method, rank = "", -1

    def __getattribute__(self, name: str) -> Any:
        cls = type(self)
        if name == cls.method and dist.get_rank() == cls.rank:
            return fails
        return super().__getattribute__(name)


class FaultyWriter(Faulty, HoldfastWriter):
    """Of saves."""


class LateWriter(HoldfastWriter):
    """Its future fails on one rank, when all is written."""

    def write_data(self, plan: Any, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, and fail."""
        written = super().write_data(plan, planner)
        if dist.get_rank() != 3:
            return written
        failed: Future[list[WriteResult]] = Future()
        failed.set_exception(ValueError("late"))
        return failed


class FaultyReader(Faulty, HoldfastReader):
    """Of loads."""


def fails(*_: Any, **kwargs: Any) -> Any:
    """Fail."""
    raise ValueError("this rank fails here")


def faulty_writers(folder: Path) -> None:
    """Any rank at any call: all hear of it, what was there stays, the next save goes through."""
    save({"n": 0, "t": torch.zeros(8)}, folder)
    faults = [("set_up_storage_writer", 0), ("set_up_storage_writer", 2), ("prepare_local_plan", 1),
              ("prepare_global_plan", 0), ("write_data", 2), ("finish", 0)]  # fmt: skip
    for FaultyWriter.method, FaultyWriter.rank in faults:
        with pytest.raises(CheckpointException) as caught:
            save({"n": 1, "t": torch.ones(8)}, folder, FaultyWriter())
        assert list(caught.value.failures) == [FaultyWriter.rank], FaultyWriter.method
        assert load({"n": -1, "t": torch.ones(8)}, folder)["n"] == 0, FaultyWriter.method
    with pytest.raises(CheckpointException, match="late"):
        save({"n": 1, "t": torch.ones(8)}, folder, LateWriter())
    assert load({"n": -1}, folder)["n"] == 0
    save({"n": 2, "t": torch.ones(8)}, folder)
    assert load({"n": -1}, folder)["n"] == 2


def faulty_readers(folder: Path) -> None:
    """Any rank at any call: all hear of it."""
    save({"n": 0, "t": torch.zeros(8)}, folder)
    for FaultyReader.method, FaultyReader.rank in (
        ("read_metadata", 3), ("prepare_local_plan", 1), ("prepare_global_plan", 0),
        ("read_data", 2), ("set_up_storage_reader", 0),
    ):  # fmt: skip
        with FaultyReader(folder) as reader, pytest.raises(CheckpointException) as caught:
            dcp.load({"n": -1, "t": torch.ones(8)}, storage_reader=reader)
        assert list(caught.value.failures) == [FaultyReader.rank], FaultyReader.method


def held_by(folder: Path) -> list[set[str]]:
    """Return the tensors in each rank's segment."""
    there = CheckpointFolder(DirectoryStore(folder))
    shards = there.manifest().shards[:WORLD]
    return [{entry.spec.fqn for entry in there.header(shard).entries} for shard in shards]


def dedup(folder: Path) -> None:
    """What all ranks have is written once; by the first of them, if the planner says so."""
    state = {str(n): torch.full((100,), float(n)) for n in range(8)}
    save(state, folder)
    spread = held_by(folder)
    save(state, folder, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    lowest = held_by(folder)

    assert sorted(name for names in spread for name in names) == sorted(state)
    assert max(map(len, spread)) == 2
    assert lowest[0] == set(state)


def plan_caching(folder: Path) -> None:
    """Plans are kept while the state stays, made anew where it changes, dropped by an error."""
    mesh = mesh_for([Shard(0)])
    for step in range(6):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        rows = 5 if step < 3 else 6
        full = torch.full((rows, 2), float(step))
        state = {"t": distribute_tensor(full, mesh, [Shard(0)]), "n": step}
        if step == 2:
            FaultyWriter.method, FaultyWriter.rank = "write_data", 1
            with pytest.raises(CheckpointException, match="fails"):
                save(state, folder, FaultyWriter(), planner=planner)
            continue
        save(state, folder, planner=planner)
        found = {"t": zeros(rows, 2, device_mesh=mesh, placements=[Shard(0)]), "n": -1}
        load(found, folder)
        assert torch.equal(whole(found["t"]), full), step
        assert found["n"] == step


def bad_loads(folder: Path) -> None:
    """A missing key and another size are refused on all ranks, and named."""
    save({"t": torch.zeros(3)}, folder)
    for state, named in (({"u": torch.zeros(3)}, "u"), ({"t": torch.zeros(4)}, "t")):
        with pytest.raises(CheckpointException, match=named):
            load(state, folder)


def async_saves(folder: Path) -> None:
    """With torch's stager and ours, one after the other, from the same writer."""
    model, optimizer = trained("fsdp")
    writer = HoldfastWriter()
    with HoldfastStager() as stager:
        for number, used in enumerate([None, stager, stager, stager]):
            train(model, optimizer, number)
            state = state_of(model, optimizer) | {"n": number}
            expected = copy.deepcopy(whole(state))
            saving = dcp.async_save(
                state, checkpoint_id=folder / str(number), storage_writer=writer, async_stager=used
            )
            future = getattr(saving, "upload_completion", saving)
            future.result(60)
            found = load(state_of(*trained("fsdp", steps=1)) | {"n": -1}, folder / str(number))
            assert same(whole(found), expected), number


SCENARIOS: list[Callable[[Path], None]] = [
    reshard, empty_shards, submeshes, train_on, change_parallelism, pipeline, experts, fine_tune,
    partial_load, optimizers, key_order, stateful, overwrite, no_dist, faulty_writers,
    faulty_readers, dedup, plan_caching, bad_loads, async_saves,
]  # fmt: skip


def main(folder: Path, rank: int, world: int) -> None:
    """Run them all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    for scenario in SCENARIOS:
        scenario(folder / scenario.__name__)
        dist.barrier()
        if rank == 0:
            print("ok", scenario.__name__, flush=True)
            shutil.rmtree(folder / scenario.__name__, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
