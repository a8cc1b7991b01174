"""Tensors and modules that are not plain: what comes back is what was saved, or it is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.state import worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from holdfast.convert import exporting
from holdfast.convert.reading import CheckpointReader
from holdfast.core.ids import ShardId
from holdfast.core.shard import Shard
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.boxes import Box, whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.objectstore.memory import MemoryStore
from holdfast.reading.dtypes import TORCH
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture


class Symmetric(nn.Module):
    def forward(self, values):
        return values.triu() + values.triu(1).transpose(-1, -2)

    def right_inverse(self, values):
        return values.triu()


def trained(change=None, width=3):
    model = nn.Sequential(nn.Linear(width, width))
    if change:
        change(model[0])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, width)).square().sum().backward()
    optimizer.step()
    return {"m": model, "o": optimizer}


def two():
    return TwoTensor(torch.ones(2, 2), torch.full((2, 2), 2.0))


def bits(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("inside", [False, True], ids=["value", "parameter"])
def test_a_tensor_that_stands_for_several_is_refused(inside):
    """torchao's quantized weights: values of the first part came back in all of them."""
    state = {"x": two()}
    if inside:
        state["x"] = nn.ParameterList([nn.Parameter(two())])

    with pytest.raises(InvalidRequestError, match=r"'x.*' is a TwoTensor, made of a, b"):
        worlds.plan_of(Capture(state, rank=0, world_size=1))


class Wrapped(torch.Tensor):
    """Stands for one tensor, which has the memory, as subclasses that count or trace do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        bare = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, out)


@pytest.mark.parametrize("inside", [False, True], ids=["value", "parameter"])
def test_a_tensor_that_stands_for_another_one_is_filled(tmp_path, inside):
    def state(inner):
        if not inside:
            return {"x": Wrapped(inner)}
        return {"x": nn.ParameterList([nn.Parameter(Wrapped(inner), requires_grad=False)])}

    saved, target = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)

    worlds.there_and_back(tmp_path, state(saved), state(target))

    assert torch.equal(saved, target)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("inside", [False, True], ids=["value", "parameter"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_tensor_is_refused_by_name(inside, layout):
    with torch.no_grad():
        tensor = torch.eye(2).to_sparse(layout=layout)
    state = {"x": tensor}
    if inside:
        state["x"] = nn.ParameterList([nn.Parameter(tensor, requires_grad=False)])

    with pytest.raises(InvalidRequestError, match=r"'x.*' is torch.sparse.*only dense tensors"):
        worlds.plan_of(Capture(state, rank=0, world_size=1))


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint64"],
)
def test_the_bits_of_a_dtype_come_back(tmp_path, name):
    """NaNs with a payload, and bytes that are no number of it, among them."""
    raw = torch.arange(256, dtype=torch.int16).view(torch.uint8)
    if name == "bool":
        raw = raw % 2
    saved = raw.view(getattr(torch, name))
    target = {"x": torch.zeros_like(saved)}

    worlds.there_and_back(tmp_path, {"x": saved}, target)

    assert bits(saved) == bits(target["x"])


ALL = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
INSTEAD = {"complex": "view_as_real", "q": "int_repr", "": r"bytes, view\(torch\.uint8\)"}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", sorted(ALL - set(TORCH.values()), key=str), ids=str)
def test_a_dtype_that_the_format_lacks_is_named_with_what_to_save_instead(dtype):
    """All that the installed torch has. Of packed ones it cannot read the values itself."""
    name = str(dtype).removeprefix("torch.")
    tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
    cure = next(cure for kind, cure in INSTEAD.items() if name.lstrip("u").startswith(kind))
    tensor = torch.empty(2, dtype=dtype) if cure == "int_repr" else tensor

    with pytest.raises(InvalidRequestError, match=rf"'x' is torch\.{name}, which .*put .*{cure}"):
        worlds.plan_of(Capture({"x": tensor}, rank=0, world_size=1))


def of_every_dtype(rank, size):
    """Return rows of tensors on ``size`` ranks, as bytes that are no numbers of their dtype."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(f"d{rank}.{size}",))
    model = nn.Module()
    for name, dtype in TORCH.items():
        raw = torch.arange(7 * 2 * dtype.itemsize, dtype=torch.uint8) + 100
        full = (raw % 2 if name == "BOOL" else raw).view(dtype).view(7, 2)
        rows = -(-7 // size)
        piece = full[rank * rows : (rank + 1) * rows].clone()
        tensor = DTensor.from_local(piece, mesh, [Rows(0)], shape=(7, 2), stride=(2, 1))
        model.register_buffer(name, tensor)
    return model


def test_the_bits_of_every_dtype_come_back_on_other_ranks_and_from_an_export(tmp_path, world):
    located = []
    for rank in range(2):
        world(rank, 2)
        model = of_every_dtype(rank, 2)
        capture = Capture({"m": model}, rank=rank, world_size=2)
        located.append(worlds.Saver(tmp_path).save(capture))
    with open_files(located) as segments:
        for rank in range(3):
            world(rank, 3)
            model = of_every_dtype(rank, 3)
            expected = {name: bits(t.to_local()) for name, t in model.named_buffers()}
            for tensor in model.buffers():
                tensor.to_local().view(torch.uint8).zero_()
            Capture({"m": model}, rank=rank, world_size=3).load(segments, step=1)

            assert expected == {name: bits(t.to_local()) for name, t in model.named_buffers()}
    folder = worlds.publish(MemoryStore(), located)
    with CheckpointReader(folder) as reader:
        exporting.export(reader, tmp_path / "all.safetensors", "safetensors")
    found = load_file(tmp_path / "all.safetensors")
    world(0, 1)
    for name, tensor in of_every_dtype(0, 1).named_buffers():
        assert bits(tensor.to_local()) == bits(found[f"m.{name}"]), name


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
    ids=["symmetric", "weight_norm", "spectral_norm", "orthogonal"],
)
def test_a_parametrized_weight_is_what_it_was(tmp_path, change):
    saved, target = trained(change), trained(change)

    worlds.there_and_back(tmp_path, saved, target)

    saved["m"].eval(), target["m"].eval()
    assert bits(saved["m"][0].weight.detach()) == bits(target["m"][0].weight.detach())
    for ours, theirs in zip(target["m"].parameters(), saved["m"].parameters(), strict=True):
        kept = target["o"].state[ours], saved["o"].state[theirs]
        assert bits(kept[0]["exp_avg_sq"]) == bits(kept[1]["exp_avg_sq"])


def with_two_optimizers():
    state = trained()
    other = torch.optim.SGD(state["m"].parameters(), lr=0.1, momentum=0.9)
    other.step()
    return {**state, "sgd": other}


def test_a_parameter_of_two_optimizers_has_the_state_of_each(tmp_path):
    saved, target = with_two_optimizers(), with_two_optimizers()

    worlds.there_and_back(tmp_path, saved, target)

    for ours, theirs in zip(target["m"].parameters(), saved["m"].parameters(), strict=True):
        for name, key in (("o", "exp_avg"), ("sgd", "momentum_buffer")):
            assert bits(target[name].state[ours][key]) == bits(saved[name].state[theirs][key])


def test_groups_that_were_added_while_training_are_added_before_the_restore(tmp_path):
    """F5: till then the optimizer here lacks parameters, and the first of them is named."""
    saved, target = trained(), trained()
    for state, lr in ((saved, 0.5), (target, 0.1)):
        state["m"].append(nn.Linear(3, 3))
        state["o"] = torch.optim.Adam(state["m"][0].parameters())
        if state is saved:
            state["o"].add_param_group({"params": state["m"][1].parameters(), "lr": lr})
    with pytest.raises(InvalidRequestError, match=r"'m\.1\.bias' exists only in the checkpoint"):
        worlds.there_and_back(tmp_path, saved, target)

    target["o"].add_param_group({"params": target["m"][1].parameters()})
    worlds.there_and_back(tmp_path, saved, target)

    assert [1e-3, 0.5] == [group["lr"] for group in target["o"].param_groups]


def test_an_optimizer_of_what_the_model_no_more_has_is_refused():
    """A model sharded after the Checkpointer was made: the moments of its new optimizer were lost.

    Refused each time, until the new one is in the state.
    """
    state = trained()
    capture = Capture(state, rank=0, world_size=1)
    state["m"][0] = nn.Linear(3, 3)
    for _ in range(2):
        with pytest.raises(
            InvalidRequestError, match=r"'o' is a Adam of .*'m\.0\.weight' is another"
        ):
            capture.check()

    state["o"] = torch.optim.Adam(state["m"].parameters())
    capture.check()


def test_a_part_of_a_model_may_be_replaced():
    state = trained()
    state["m"].append(nn.Linear(3, 3))
    state["o"].add_param_group({"params": state["m"][1].parameters()})
    capture = Capture(state, rank=0, world_size=1)
    state["m"][1] = nn.Linear(3, 3)

    capture.check()


def test_renamed_tensors_are_named_with_what_they_were(tmp_path):
    saved = {"m": nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})}
    target = {"m": nn.ModuleDict({"encoders": nn.Linear(2, 2), "head": nn.Linear(2, 2)})}

    with pytest.raises(NotReadyError) as caught:
        worlds.there_and_back(tmp_path, saved, target)

    assert "'m.encoders.weight' (there: 'm.encoder.weight')" in caught.value.message
    assert "'m.encoder.bias' exist only in the checkpoint" in caught.value.message
    assert "head" not in caught.value.message


def test_of_many_names_a_few_are_shown(tmp_path):
    saved, target = {"m": nn.Sequential()}, {"m": nn.Sequential(*[nn.Linear(1, 1)] * 20)}

    with pytest.raises(NotReadyError, match=r"'m\.2\.weight' and 35 more exist only in the script"):
        worlds.there_and_back(tmp_path, saved, target)


def test_places_beyond_what_32_bits_count_are_right(tmp_path):
    """In a file with a hole: neither 8 GiB of memory nor of disk."""
    shape = (2, (1 << 30) + 4)
    identity = SegmentIdentity(id=ShardId("r", 1, 1, 0), job="j", world_size=1, plan_hash="p")
    specs = [TensorSpec(fqn=name, dtype="F32", shape=shape, box=whole(shape)) for name in "ab"]
    template = header_template(identity, specs)
    path = tmp_path / "segment"
    with path.open("wb") as file:
        file.write(template.fill(step=1, generation=1, parent=None))
        file.truncate(template.length_bytes - 16)
        file.seek(0, 2)
        file.write(torch.arange(1.0, 5.0).numpy().tobytes())
    shard = Shard(
        id=identity.id, job="j", world_size=1, plan_hash="p",
        length_bytes=template.length_bytes, root_digest=b"",
    )  # fmt: skip

    with open_files([(path, shard)]) as reader:
        last = reader.tensor("b", Box((1, shape[1] - 4), (1, 4)))
        before = reader.tensor("a", Box((1, shape[1] - 4), (1, 4)))

    assert ([[1.0, 2.0, 3.0, 4.0]], [[0.0] * 4]) == (last.tolist(), before.tolist())


def test_what_an_optimizer_keeps_of_a_parameter_without_elements_comes_back(tmp_path):
    """Steps are counted of it as of the others."""

    def made(steps):
        model = nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(2))])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            sum(p.sum() for p in model).backward()
            optimizer.step()
        return {"m": model, "o": optimizer}

    saved, target = made(3), made(0)
    worlds.there_and_back(tmp_path, saved, target)

    kept = [target["o"].state[p] for p in target["m"]]
    assert [3.0, 3.0] == [float(of["step"]) for of in kept]
    assert (0, 3) == kept[0]["exp_avg"].shape
