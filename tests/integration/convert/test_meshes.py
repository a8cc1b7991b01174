"""What ranks of a mesh have saved goes out whole, under plain names, to tools that know no mesh."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.unit.state import worlds
from tests.unit.state.conftest import world  # noqa: F401 - a fixture
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.convert.exporting import export
from holdfast.convert.importing import open_source
from holdfast.convert.plain_names import PlainNames, of_groups
from holdfast.convert.reading import CheckpointReader
from holdfast.convert.source import Chosen, Selection
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.objectstore import open_store
from holdfast.state.capture import Capture

WORLD = 4
SIZES = {"fsdp": (4,), "fsdp1": (4,), "hsdp": (2, 2), "tp": (4,), "2d": (2, 2), "3d": (2, 2, 2)}
SPLIT = {"0": ColwiseParallel(), "2": RowwiseParallel()}

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")


def whole():
    """Return the model as nobody has cut it; no dim divides evenly."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5), nn.LayerNorm(5))


def on_mesh(kind):
    """Return model and AdamW with a state whose values tell of which parameter they are."""
    model = whole()
    # Meshes of one name are equal, and torch gives one rank's out where it knows another's.
    axes = tuple(f"{axis}{dist.get_rank()}" for axis in "abc"[: len(SIZES[kind])])
    mesh = init_device_mesh("cpu", SIZES[kind], mesh_dim_names=axes)
    if kind in ("tp", "2d", "3d"):
        parallelize_module(model, mesh[axes[-1]], SPLIT, src_data_rank=None)
        mesh = mesh[axes[:-1]] if axes[1:] else None
    if kind == "fsdp1":
        settings = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model[0] = FullyShardedDataParallel(model[0], **settings)
        model = FullyShardedDataParallel(model, **settings)
    elif mesh is not None:
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {"exp_avg": parameter.detach() * 2, "exp_avg_sq": parameter.detach() * 3}
        optimizer.state[parameter] = {"step": torch.tensor(4.0), **moments}
    return {"model": model, "optimizer": optimizer}


def expected():
    """Return every tensor of the state by its plain name."""
    found = {}
    for name, value in whole().state_dict().items():
        found |= {
            f"model.{name}": value,
            f"optimizer.state.model.{name}.step": torch.tensor(4.0),
            f"optimizer.state.model.{name}.exp_avg": value * 2,
            f"optimizer.state.model.{name}.exp_avg_sq": value * 3,
        }
    return found


def put(folder, become, make, world_size):
    """Store what ``make`` makes on each rank as one checkpoint, and return its folder."""
    located = []
    (folder / "segments").mkdir(parents=True)
    for rank in range(world_size):
        become(rank, world_size)
        capture = Capture(make(), rank=rank, world_size=world_size)
        located.append(worlds.Saver(folder / "segments").save(capture))
    return worlds.publish(open_store(str(folder / "store"), make=True), located)


@pytest.fixture(params=SIZES, scope="module")
def mesh(request, tmp_path_factory):
    """A checkpoint of each mesh."""
    with worlds.becoming() as become:
        size = torch.Size(SIZES[request.param]).numel()
        folder = tmp_path_factory.mktemp("mesh")
        yield put(folder, become, partial(on_mesh, request.param), size)


def exported(folder, dest, form, *only, rank=None, **options):
    with CheckpointReader(folder) as reader:
        chosen = Chosen(PlainNames(reader, rank), Selection(only=only or ("model", "optimizer")))
        return export(chosen, dest, form, **options)


def assert_same(wanted, found):
    assert sorted(wanted) == sorted(found)
    assert [] == [name for name, value in wanted.items() if not torch.equal(value, found[name])]


def test_torch_loads_what_a_mesh_has_saved(mesh, tmp_path):
    """F89: model and optimizer, in one file and by the names of the state."""
    exported(mesh, tmp_path / "all.pt", "torch")

    assert_same(expected(), torch.load(tmp_path / "all.pt", weights_only=True))


def test_the_page_says_how_plain_torch_gets_the_optimizer(mesh, tmp_path):
    """The function as printed in docs/howto/export.md; the next step is that of the same state."""
    page = (Path(__file__).parents[3] / "docs/howto/export.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def load_" in c)
    exec(code, there := {})
    exported(mesh, tmp_path / "all.pt", "torch")
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters())
    there["load_optimizer"](tmp_path / "all.pt", model, optimizer)

    for name, parameter in model.named_parameters():
        kept = {
            f"optimizer.state.model.{name}.{k}": v for k, v in optimizer.state[parameter].items()
        }
        assert_same({key: expected()[key] for key in kept}, kept)
        assert len(kept) == 3
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_hugging_face_folder_has_files_of_the_size_that_was_asked_for(mesh, tmp_path):
    exported(mesh, tmp_path / "hf", "hf", "model", file_bytes_max=300)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        held = safetensors.torch.load_file(tmp_path / "hf" / file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 300
        assert {file} == {index["weight_map"][name] for name in held}
        found |= held

    assert_same({k: v for k, v in expected().items() if k.startswith("model.")}, found)


def test_a_model_without_a_mesh_takes_its_weights(mesh, tmp_path):
    with CheckpointReader(mesh) as reader:
        weights = Chosen(PlainNames(reader), Selection(only=("model",), strip="model"))
        export(weights, tmp_path / "w.safetensors", "safetensors")
    model = whole()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "w.safetensors"))

    assert_same(whole().state_dict(), model.state_dict())


@pytest.mark.parametrize("there", [("fsdp", 0), ("fsdp", 3), ("2d", 2)], ids=str)
def test_plain_dcp_loads_it_on_another_mesh(mesh, tmp_path, there):
    """By torch alone: each rank takes its boxes of model and optimizer."""
    kind, rank = there
    exported(mesh, tmp_path / "dcp", "dcp")
    with worlds.becoming() as become:
        become(rank, WORLD)
        state = on_mesh(kind)
        wanted = {f"model.{name}": p for name, p in state["model"].named_parameters()}
        for name, parameter in state["model"].named_parameters():
            kept = state["optimizer"].state[parameter].items()
            wanted |= {f"optimizer.state.model.{name}.{key}": value for key, value in kept}
        before = {name: value.detach().clone() for name, value in wanted.items()}
        for value in wanted.values():
            value.detach().zero_()
        dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)

        assert any(isinstance(value, DTensor) for value in wanted.values())
        for name, value in wanted.items():
            here, then = (v._local_tensor if isinstance(v, DTensor) else v
                          for v in (value.detach(), before[name]))  # fmt: skip
            assert torch.equal(here, then), name


def test_a_rank_of_a_mesh_of_three_axes_takes_its_boxes(mesh):
    """F18: what each mesh has saved, by path, into HSDP with tensor parallelism."""
    with worlds.becoming() as become:
        become(5, 8)
        state, wanted = on_mesh("3d"), on_mesh("3d")
        optimizer = state["optimizer"]
        for parameter in state["model"].parameters():
            parameter.detach().zero_()
            optimizer.state[parameter] = {}
        optimizer.state.clear()
        holdfast.load(f"{mesh.store.url}/{mesh.prefix}", state, rng=False)

        found, expected = (
            [p.to_local() for p in s["model"].parameters()]
            + [v.to_local() if isinstance(v, DTensor) else v
               for p in s["model"].parameters() for v in s["optimizer"].state[p].values()]
            for s in (state, wanted)
        )  # fmt: skip
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_one_format_becomes_another(mesh, tmp_path, form):
    """``convert``: what each format's own reader gives goes into the next one."""
    exported(mesh, tmp_path / "first", form)
    export(open_source(tmp_path / "first"), tmp_path / "hf", "hf")
    export(open_source(tmp_path / "hf"), tmp_path / "second", "torch")

    assert_same(expected(), torch.load(tmp_path / "second", weights_only=True))


def stage(first, last):
    """A stage of a pipeline by hand: each sharded over its two ranks, ``layer`` on all stages."""
    name = f"s{dist.get_rank()}"
    ranks = [0, 1] if dist.get_rank() < 2 else [2, 3]
    mesh = dist.device_mesh.DeviceMesh("cpu", ranks, mesh_dim_names=(name,))
    torch.manual_seed(ranks[0])
    model = nn.ModuleDict({(first if ranks[0] == 0 else last): nn.Linear(4, 3)})
    for layer in model.values():
        fully_shard(layer, mesh=mesh)
    return {"model": model}


def test_stages_with_names_of_their_own_are_one_model(world, tmp_path):  # noqa: F811
    folder = put(tmp_path, world, partial(stage, "0", "1"), WORLD)
    exported(folder, tmp_path / "all.pt", "torch", "model")
    found = torch.load(tmp_path / "all.pt", weights_only=True)

    names = ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight"]
    assert names == sorted(found)
    for number, seed in enumerate((0, 2)):
        torch.manual_seed(seed)
        assert torch.equal(nn.Linear(4, 3).weight, found[f"model.{number}.weight"])


def test_what_several_stages_call_by_one_name_is_never_mixed(world, tmp_path):  # noqa: F811
    """Nothing is left of the export; the error names tensor, groups and how to choose."""
    folder = put(tmp_path, world, partial(stage, "layer", "layer"), WORLD)
    with pytest.raises(InvalidRequestError) as refused:
        exported(folder, tmp_path / "all.pt", "torch", "model")
    assert ["segments", "store"] == sorted(path.name for path in tmp_path.iterdir())
    for text in ("'model.layer.", "rank 0, rank 2", "--rank 0", "rank.2.model.layer."):
        assert text in refused.value.message
    with pytest.raises(NotFoundError, match="begin with: 0, 2"):
        exported(folder, tmp_path / "all.pt", "torch", "model", rank=1)

    exported(folder, tmp_path / "two.pt", "torch", "model", rank=2)
    found = torch.load(tmp_path / "two.pt", weights_only=True)
    torch.manual_seed(2)
    assert torch.equal(nn.Linear(4, 3).weight, found["model.layer.weight"])
    with CheckpointReader(folder) as reader:
        export(reader, tmp_path / "each.pt", "torch")
    names = torch.load(tmp_path / "each.pt", weights_only=True)
    assert {"rank.0.model.layer.weight", "rank.2.model.layer.weight"} <= set(of_groups(names))
