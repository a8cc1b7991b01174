"""State of which each rank holds a piece: what of it is planned by whom, and what is refused."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.unit.state import worlds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.core import shard as shards
from holdfast.core.shard import unlike_ranks
from holdfast.errors import InvalidRequestError
from holdfast.format import index
from holdfast.format.boxes import covers, whole
from holdfast.format.header import parse_header
from holdfast.format.names import unranked
from holdfast.format.plan_faults import first_fault
from holdfast.reading.files import open_files
from holdfast.snapshot.plan import make_plan
from holdfast.state.capture import Capture

WORLD = 4


def built(kind, wide=1):
    """Return the state of one rank: a model on a mesh, and what AdamW keeps of it."""
    model = nn.Sequential(
        nn.Linear(7, 12 * wide), nn.ReLU(), nn.Linear(12 * wide, 5 * wide), nn.LayerNorm(5 * wide)
    )  # fmt: skip
    # Meshes of one name are equal, and torch gives one rank's out where it knows another's.
    names = tuple(f"{axis}{dist.get_rank()}" for axis in ("a", "b"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=names[:1])
    if kind == "2d":
        split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh[names[1]], split)
        mesh = mesh[names[0]]
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def planned(rank, kind):
    capture = Capture(built(kind), rank=rank, world_size=WORLD)
    return make_plan(capture, job="j", run="r", generation=1, rank=rank, world_size=WORLD)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "2d"])
def test_all_ranks_together_plan_every_element_once(world, kind):
    """F37, F38: no hole and no overlap; ranks that hold the same box share the work."""
    plans = []
    for rank in range(WORLD):
        world(rank)
        plans.append(planned(rank, kind))

    headers = [
        parse_header(plan.template.fill(step=1, generation=1, parent=None), plan.length_bytes)
        for plan in plans
    ]
    for tensor in index.build(headers).tensors:
        boxes = [held.box for held in tensor.boxes]
        assert covers(whole(tensor.shape), boxes), tensor.fqn
        # Who has a scalar saves it, so that nobody needs another's segment for a few bytes.
        copies = 1 if tensor.shape else 2 if tensor.fqn.startswith("rank.") else WORLD
        elements = torch.Size(tensor.shape).numel() * copies
        assert sum(box.elements_count for box in boxes) == elements, tensor.fqn
    assert first_fault(headers) == unlike_ranks(map(shard_of, headers)) == ""
    pieces = [[*plan.deferred, *plan.eager] for plan in plans]
    sizes = [sum(piece.tensor.nbytes for piece in some) for some in pieces]
    assert max(sizes) < 3 * min(sizes)  # FSDP leaves its last ranks less


def shard_of(header):
    mine = header.identity
    return shards.Shard(
        id=mine.id, job="j", world_size=mine.world_size, plan_hash=mine.plan_hash,
        length_bytes=1, root_digest=b"",
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "lacking"), [("fsdp", 2), ("hsdp", 2), ("2d", 0), ("2d", 3)])
def test_a_rank_that_has_less_than_its_mates_is_seen_before_a_commit(world, kind, lacking):
    """F38: one has not made the state of a parameter, or is not given its optimizer."""
    headers = []
    for rank in range(WORLD):
        world(rank)
        state = built(kind)
        if rank == lacking:
            state["optimizer"].state.pop(state["model"][2].weight)
        capture = Capture(state, rank=rank, world_size=WORLD)
        plan = make_plan(capture, job="j", run="r", generation=1, rank=rank, world_size=WORLD)
        text = plan.template.fill(step=1, generation=1, parent=None)
        headers.append(parse_header(text, plan.length_bytes))

    assert unlike_ranks(map(shard_of, headers))
    assert "optimizer.state.model.2.weight.exp_avg' [5, 12]" in first_fault(headers)


@pytest.mark.parametrize(("kind", "holders"), [("fsdp", 1), ("hsdp", 2)])
def test_what_is_reserved_before_an_optimizer_has_stepped_is_what_is_saved_then(
    world, kind, holders
):
    """P8: of what ranks hold alike each saves its share, and loads all of it."""
    world(1)
    state = built(kind, wide=40)
    capture = Capture(state, rank=1, world_size=WORLD)
    known = capture.estimate()
    tensors_bytes = sum(t.tensor.nbytes for t in capture.survey().tensors)
    state["optimizer"].state.clear()

    expected = capture.estimate()

    assert expected.names_needs
    assert 0.9 < expected.own_bytes / known.own_bytes < 1.1
    assert 0.9 < expected.loaded_bytes / known.loaded_bytes < 1.1
    held = tensors_bytes - tensors_bytes // holders
    assert 0.9 * held <= known.loaded_bytes - known.own_bytes <= 1.1 * held


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("sizes", [(WORLD,), (2, 2)], ids=["fsdp", "hsdp"])
def test_a_rank_without_rows_knows_what_all_ranks_save_together(world, sizes, stepped):
    """P8: what is reserved for a whole checkpoint is not as many times what this rank has of it."""
    known, saved_bytes = set(), 0
    for rank in range(WORLD):
        world(rank)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=(f"a{rank}", f"b{rank}")[: len(sizes)])
        model = nn.Sequential(nn.Linear(50_000, 1), nn.Linear(1, 8))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        known.add(Capture({"m": model, "o": optimizer}, rank=rank, world_size=WORLD).estimate())
        for p in model.parameters():
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
        capture = Capture({"m": model, "o": optimizer}, rank=rank, world_size=WORLD)
        if stepped:
            known.add(capture.estimate())
        plan = make_plan(capture, job="j", run="r", generation=1, rank=rank, world_size=WORLD)
        saved_bytes += plan.length_bytes

    for estimate in known:
        assert 0.9 * saved_bytes < estimate.whole_bytes < 1.1 * saved_bytes


def test_a_layer_beside_the_plan_of_tensor_parallelism_is_saved_by_each_row_as_its_own(world):
    """Nothing tells whether other ranks of the grid hold the same, or another stage of a model."""
    names = Counter()
    for rank in range(WORLD):
        world(rank)
        plan = planned(rank, "2d")
        names.update(e.spec.fqn for e in plan.template.entries if "model.3.weight" in e.spec.fqn)

    weights = {name: count for name, count in names.items() if unranked(name) == "model.3.weight"}
    assert weights == {"rank.0.model.3.weight": 2, "rank.1.model.3.weight": 2}


def test_what_an_optimizer_writes_is_copied_after_the_save_has_returned(world):
    """A DTensor is a parameter as any: only the next step of its optimizer writes it."""
    world(1)

    plan = planned(1, "fsdp")

    assert [] == plan.eager
    assert all(type(piece.tensor) is torch.Tensor for piece in plan.deferred)
    assert len(plan.versions()) == 6  # of its parameters: another's writing is seen


def test_memory_that_a_module_has_swapped_below_its_parameters_makes_another_plan(world):
    """``to()`` keeps the parameter and replaces what is in it."""
    world(2)
    state = built("fsdp")
    capture = Capture(state, rank=2, world_size=WORLD)
    plan = make_plan(capture, job="j", run="r", generation=1, rank=2, world_size=WORLD)
    assert plan.is_current()

    weight = state["model"][0].weight
    weight._local_tensor = weight._local_tensor.clone()

    assert not plan.is_current()


def test_a_table_that_holds_whole_parameters_is_put_right_before_it_is_looked_at(world):
    """So a forward without a backward leaves FSDP."""
    world(1)
    state = built("fsdp")
    capture = Capture(state, rank=1, world_size=WORLD)
    plan = make_plan(capture, job="j", run="r", generation=1, rank=1, world_size=WORLD)
    names = [captured.fqn for captured in capture.survey().tensors]

    state["model"][0].unshard()
    assert not isinstance(state["model"][0].weight, DTensor)

    assert plan.is_current()
    state["model"][0].unshard()
    assert names == [captured.fqn for captured in capture.survey().tensors]


def test_a_model_that_is_sharded_after_its_checkpointer_was_made_needs_its_new_optimizer(world):
    """Its old one trains parameters that are gone, and was saved in place of the new one."""
    world(1)
    model = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    capture = Capture(state, rank=1, world_size=WORLD)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("late",)))
    with pytest.raises(InvalidRequestError, match="Make the optimizer after fully_shard"):
        capture.check()

    state["optimizer"] = torch.optim.AdamW(model.parameters())
    capture.check()
    assert {(0, 1, 2, 3)} == set(capture.survey().mesh_of.values())


def test_tensors_of_another_shape_than_those_of_the_mesh_are_refused_by_name(world, tmp_path):
    """The whole shapes are compared and told, not those of the pieces."""
    with saved(tmp_path, world, lambda _rank: built("fsdp")) as segments:
        world(2)
        state = built("fsdp", wide=2)
        with pytest.raises(InvalidRequestError, match=r"'model\.0\.weight' is \(24, 7\)") as found:
            Capture(state, rank=2, world_size=WORLD).load(segments, step=1)

    assert "was saved as (12, 7)" in found.value.message


class Scaled(torch.optim.SGD):
    """An optimizer of somebody's own that keeps what belongs to its rank's piece."""


def scaled(rank):
    """One row of a tensor of four on each rank, and what its optimizer keeps of that row."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=(f"r{rank}",))
    model = nn.Module()
    weight = distribute_tensor(torch.zeros(WORLD, 3), mesh, [Shard(0)], src_data_rank=None)
    model.weight = nn.Parameter(weight)
    optimizer = Scaled(model.parameters(), lr=0.1)
    here = model.weight.to_local().detach()
    optimizer.state[model.weight] = {
        "row": torch.full_like(here, rank + 1.0),
        "scale": torch.tensor(rank + 1.0),
    }
    return {"model": model, "optimizer": optimizer}


def saved(folder, world, make, world_size=WORLD):
    """Save what ``make`` makes of each rank; return a reader of all of it."""
    located = []
    for rank in range(world_size):
        world(rank, world_size)
        capture = Capture(make(rank), rank=rank, world_size=world_size)
        located.append(worlds.Saver(folder).save(capture))
    return open_files(located)


def test_what_an_optimizer_keeps_of_one_ranks_piece_stays_that_ranks(world, tmp_path):
    """Defect of an attack: all ranks were given what rank 0 had kept of its piece."""
    with saved(tmp_path, world, scaled) as segments:
        for rank in range(WORLD):
            world(rank)
            state = scaled(rank)
            [kept] = state["optimizer"].state.values()
            for value in kept.values():
                value.zero_()
            Capture(state, rank=rank, world_size=WORLD).load(segments, step=1)

            [kept] = state["optimizer"].state.values()
            assert (kept["row"] == rank + 1.0).all()
            assert kept["scale"] == rank + 1.0


def residual(rank):
    """A tensor that all ranks have whole, and what each rank's optimizer keeps of it, its own."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=(f"r{rank}",))
    model = nn.Module()
    weight = distribute_tensor(torch.zeros(WORLD, 3), mesh, [Replicate()], src_data_rank=None)
    model.weight = nn.Parameter(weight)
    optimizer = Scaled(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"residual": torch.full((WORLD, 3), rank + 1.0)}
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("stepped", [False, True])
def test_what_an_optimizer_keeps_of_a_whole_parameter_stays_its_ranks_too(world, tmp_path, stepped):
    """Defect of an attack: in the shape of its parameter it was the first rank's for all."""
    with saved(tmp_path, world, residual) as segments:
        for rank in range(WORLD):
            world(rank)
            state = residual(rank)
            if not stepped:
                state["optimizer"].state.clear()
            Capture(state, rank=rank, world_size=WORLD).load(segments, step=1)

            [kept] = state["optimizer"].state.values()
            assert type(kept["residual"]) is torch.Tensor
            assert (kept["residual"] == rank + 1.0).all()


def stage(rank, ranks):
    """A stage of a pipeline by hand, on its ranks alone: each calls its layer by the same name."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=(f"r{rank}",))
    model = nn.Module()
    weight = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None)
    model.weight = nn.Parameter(torch.ones_like(weight) * rank)
    return {"model": model}


def test_one_stage_is_never_given_what_another_one_saved(world, tmp_path):
    """Defect of an attack: half of the rows came from one stage, half from the other."""
    with saved(tmp_path, world, lambda rank: stage(rank, [rank]), world_size=2) as segments:
        world(2)
        capture = Capture(stage(2, [2, 3]), rank=2, world_size=WORLD)
        with pytest.raises(InvalidRequestError, match="saved by several groups of ranks"):
            capture.load(segments, step=1)


def refusal(state):
    with pytest.raises(InvalidRequestError) as refused:
        Capture(state, rank=0, world_size=WORLD)
    return refused.value.message


def test_a_distributed_tensor_of_its_own_is_refused(world):
    world(0)
    mesh = init_device_mesh("cpu", (WORLD,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    assert isinstance(tensor, DTensor)

    assert "not supported yet: extra.t is a DTensor" in refusal({"extra": {"t": tensor}})


class CountsItsPiece(torch.optim.SGD):
    """Another's optimizer: a number of each rank's piece."""


def test_an_optimizer_without_its_model_knows_the_mesh_of_its_parameters(world):
    world(3)
    state = built("2d")

    survey = Capture({"optimizer": state["optimizer"]}, rank=3, world_size=WORLD).survey()

    assert {(0, 1, 2, 3), (1, 3)} == set(survey.mesh_of.values())


def test_a_number_that_another_optimizer_keeps_is_each_ranks_own(world):
    world(1)
    model = built("fsdp")["model"]
    optimizer = CountsItsPiece(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p] = {"scale": torch.tensor(1.0)}

    survey = Capture({"model": model, "optimizer": optimizer}, rank=1, world_size=WORLD).survey()

    assert {"rank"} == {t.home.value for t in survey.tensors if t.fqn.endswith(".scale")}
