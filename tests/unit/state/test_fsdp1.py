"""FSDP1: flat parameters are ranges of tensors; saved as such, read into boxes and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.unit.state import worlds
from tests.unit.state.test_needs_over_meshes import Saved
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from holdfast.core.shard import unlike_ranks
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format import index
from holdfast.format.boxes import covers, whole
from holdfast.format.header import parse_header
from holdfast.format.plan_faults import first_fault
from holdfast.format.segment import header_length
from holdfast.reading.files import open_files
from holdfast.snapshot.plan import make_plan
from holdfast.state.capture import Capture
from holdfast.state.local_boxes import is_nothing, local, local_box, shape_of

WORLD = 4
pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


def layers():
    """A model of which no layer divides evenly; its last one is tied to the one before."""
    model = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(5, 3), nn.Linear(5, 3))
    model[3].weight = model[2].weight
    return model


def wrapped(strategy=ShardingStrategy.FULL_SHARD, **kwargs):
    kwargs = {"use_orig_params": True, "device_id": torch.device("cpu"), **kwargs}
    model = layers()
    model[0] = Fsdp(model[0], sharding_strategy=strategy, **kwargs)
    return Fsdp(model, sharding_strategy=strategy, **kwargs)


def sharded():
    model = layers()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=(f"r{dist.get_rank()}",)
    )
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    return model


def hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"a{dist.get_rank()}", "b"))
    return wrapped(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


KINDS = {
    "alone": layers,
    "fsdp2": sharded,
    "full": wrapped,
    "grad_op": lambda: wrapped(ShardingStrategy.SHARD_GRAD_OP),
    "none": lambda: wrapped(ShardingStrategy.NO_SHARD),
    "hybrid": hybrid,
    # The first rank has the first row of the weight in both, and of the bias nothing in the first.
    "layer": lambda: Fsdp(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu")),
    "layer2": lambda: fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (WORLD,))),
}


def numbered(name, fqn, shape):
    """Return values that tell a tensor, and each of its elements, from all others."""
    first = sum(map(ord, name + fqn)) * 1000
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def state(kind, *, filled):
    """Return what one rank has, and what all of it should be, by name."""
    model = KINDS[kind]()
    optimizer = torch.optim.AdamW(model.parameters())
    survey = Capture({"m": model}, rank=dist.get_rank(), world_size=dist.get_world_size()).survey()
    names = {id(p): survey.fqn_of[id(p)] for p in model.parameters()}
    for p in model.parameters():
        box = local_box("p", p)
        if filled and not is_nothing(p):  # FSDP2 steps what it has no rows of
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(5.0), **moments}
            for key, tensor in {"w": p, **moments}.items():
                put(tensor, numbered(key, names[id(p)], box.shape), box.box)
    return {"m": model, "o": optimizer}, names


def part(values, box):
    if len(box.offsets) != values.dim():
        return values.reshape(-1)[box.offsets[0] : box.stops[0]]
    return values[box.within(whole(values.shape))]


def put(tensor, values, box):
    with torch.no_grad():
        local(tensor).copy_(part(values, box))


def save(folder, world, kind, world_size):
    located = []
    for rank in range(world_size):
        world(rank, world_size)
        capture = Capture(state(kind, filled=True)[0], rank=rank, world_size=world_size)
        located.append(worlds.Saver(folder).save(capture))
    return located


def check_loaded(segments, kind, rank, world_size):
    held, names = state(kind, filled=False)
    Capture(held, rank=rank, world_size=world_size).load(segments, step=1)
    check(held, names, rank)


def check(held, names, rank, *, model=True):
    for p in held["m"].parameters():
        box, fqn = local_box("p", p), names[id(p)]
        kept = held["o"].state.get(p, {})
        assert kept.keys() == {"step", "exp_avg", "exp_avg_sq"} or is_nothing(p), fqn
        assert float(kept.get("step", 5.0)) == 5.0
        for key, tensor in {**({"w": p} if model else {}), **kept}.items():
            if key != "step":
                expected = part(numbered(key, fqn, shape_of(p)), box.box)
                assert torch.equal(expected, local(tensor)), (fqn, key, rank)


@pytest.mark.parametrize("kind", ["full", "grad_op", "none", "hybrid"])
def test_all_ranks_together_save_every_element_once(world, tmp_path, kind):
    """Ranges of n-dim tensors lie in no box; a rank without any of a tensor says so."""
    files = save(tmp_path, world, kind, WORLD)

    headers = []
    for path, _ in files:
        data = path.read_bytes()
        headers.append(parse_header(data[: header_length(data)], len(data)))
    assert first_fault(headers) == unlike_ranks(shard for _, shard in files) == ""
    for tensor in index.build(headers).tensors:
        boxes = [held.box for held in tensor.pieces]
        assert covers(whole(tensor.shape), boxes), tensor.fqn
        copies = 1 if tensor.shape else len(boxes)
        elements = torch.Size(tensor.shape).numel() * copies
        assert sum(box.elements_count for box in boxes) == elements, tensor.fqn


@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [
        ("alone", 1, "full", 4),
        ("full", 4, "full", 4),
        ("full", 4, "full", 3),
        ("full", 3, "grad_op", 4),
        ("full", 4, "fsdp2", 4),
        ("grad_op", 3, "fsdp2", 2),
        ("fsdp2", 4, "full", 3),
        ("full", 4, "alone", 1),
        ("full", 4, "hybrid", 4),
        ("hybrid", 4, "none", 3),
        ("none", 2, "hybrid", 4),
    ],
)
def test_each_form_is_restored_into_each_other(
    world, tmp_path, before, ranks_before, after, ranks_after
):
    """Names, moments and steps, too: also of tensors of which a text does not tell."""
    files = save(tmp_path, world, before, ranks_before)
    with open_files(files) as segments:
        for rank in range(ranks_after):
            world(rank, ranks_after)
            check_loaded(segments, after, rank, ranks_after)


@pytest.mark.parametrize("only", [None, ["o"]])
@pytest.mark.parametrize(
    ("before", "after", "ranks_after"),
    [
        ("full", "full", 4),
        ("full", "fsdp2", 4),
        ("full", "full", 3),
        ("fsdp2", "full", 4),
        ("layer", "layer2", 4),
    ],
)
def test_what_a_rank_names_by_bytes_is_enough(world, tmp_path, before, after, ranks_after, only):
    """A rank that had nothing of a tensor then, and has some now, asks for the heads of all."""
    saved = Saved(tmp_path, world, lambda _rank: state(before, filled=True)[0], WORLD)
    for rank in range(ranks_after):
        world(rank, ranks_after)
        held, names = state(after, filled=False)
        capture = Capture(held, rank=rank, world_size=ranks_after)
        try:
            saved.load(capture, saved.needs(capture, only), only)
        except NotReadyError:
            assert only
            saved.load(capture, saved.needs(capture, only, far=True), only)
        check(held, names, rank, model=only is None)


def test_the_whole_tensor_is_read_in_its_true_shape(world, tmp_path):
    """So that an export has it as the plain model does."""
    files = save(tmp_path, world, "full", WORLD)
    with open_files(files) as segments:
        found = segments.tensor("o.state.m.0.weight.exp_avg")
        assert torch.equal(found, numbered("exp_avg", "m.0.weight", (12, 7)))
        assert not [name for name in segments.specs() if "_fsdp" in name]


def test_a_range_that_no_rank_saves_is_seen_and_named(world, tmp_path):
    """Before the commit, of what an optimizer keeps, too, of which some ranks know nothing."""
    located = []
    for rank in range(WORLD):
        world(rank)
        held, names = state("full", filled=True)
        if rank == 2:
            p = next(p for p in held["m"].parameters() if p in held["o"].state)
            lost = names[id(p)]
            del held["o"].state[p]["exp_avg"]
        located.append(worlds.Saver(tmp_path).save(Capture(held, rank=rank, world_size=WORLD)))

    headers = []
    for path, _ in located:
        data = path.read_bytes()
        headers.append(parse_header(data[: header_length(data)], len(data)))
    assert unlike_ranks(shard for _, shard in located)
    assert f"of tensor 'o.state.{lost}.exp_avg'" in first_fault(headers)


def planned(held, rank=1):
    return make_plan(
        Capture(held, rank=rank, world_size=WORLD),
        job="j", run="r", generation=1, rank=rank, world_size=WORLD,
    )  # fmt: skip


def test_ranks_that_have_nothing_of_a_tensor_agree_what_is_shared_out(world):
    """What is kept of it they do not know, and have no part in."""
    hashes = set()
    for rank in range(WORLD):
        world(rank)
        hashes.add(planned(state("full", filled=True)[0], rank).plan_hash.partition(".")[2])

    assert len(hashes) == 1


def test_what_an_optimizer_writes_is_copied_after_the_save_has_returned(world):
    world(1)

    plan = planned(state("full", filled=True)[0])

    assert [] == plan.eager
    assert plan.versions()


@pytest.mark.parametrize("as_params", [False, True])
def test_whole_parameters_in_the_tables_are_not_what_is_saved(world, as_params):
    """So a forward leaves SHARD_GRAD_OP until a backward; as parameters, summon_full_params."""
    world(1)
    held, _ = state("grad_op", filled=True)
    plan = planned(held)
    assert plan.is_current()

    handle = held["m"]._handle
    views = [torch.zeros(shape) for shape in handle.flat_param._shapes]
    for view, info, p in zip(
        views, handle.flat_param._param_infos, handle.flat_param._params, strict=True
    ):
        if as_params:
            p.data = view
        else:
            del info.module._parameters[info.param_name]
            info.module._parameters[info.param_name] = view

    if as_params:
        assert not plan.is_current()
        with pytest.raises(InvalidRequestError, match="inside of summon_full_params"):
            planned(held)
    else:
        assert plan.is_current()
        assert plan.plan_hash == planned(held).plan_hash


def test_flat_parameters_without_names_are_refused_with_the_cure(world):
    world(0)
    with pytest.raises(InvalidRequestError, match="make it with use_orig_params=True"):
        Capture({"m": wrapped(use_orig_params=False)}, rank=0, world_size=WORLD)


def test_hybrid_shards_that_only_some_ranks_have_are_refused_with_the_cure(world):
    """Half of eight ranks train this model: what the others have is another one."""
    world(1, 8)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    model = wrapped(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    said = r"m is sharded over ranks \[0, 1\] and copied to ranks \[1, 3\], .* \(FSDP2\)"
    with pytest.raises(InvalidRequestError, match=said):
        Capture({"m": model}, rank=1, world_size=8)


def test_an_optimizer_of_flat_parameters_without_its_model_is_refused_with_the_cure(world):
    world(0)
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p)}
    with pytest.raises(InvalidRequestError, match="put the whole wrapped module"):
        Capture({"o": optimizer}, rank=0, world_size=WORLD)


def test_a_parameter_that_lies_column_by_column_is_refused_with_the_cure(world):
    world(0)
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.zeros(3, 4).t())
    model = Fsdp(layer, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(InvalidRequestError, match="'weight' of m was not contiguous"):
        Capture({"m": model}, rank=0, world_size=WORLD)
