"""ShardedTensor: each rank saves the memory of its shard, with its box of the whole."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.unit.state.test_fsdp1 import numbered, part, planned
from tests.unit.state.test_inner_optimizers import headers_of, saved_by
from tests.unit.state.test_needs_over_meshes import Saved
from tests.unit.state.test_whose_tensor import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.core.shard import unlike_ranks
from holdfast.errors import InvalidRequestError
from holdfast.format import index
from holdfast.format.boxes import Box, covers, whole
from holdfast.format.plan_faults import first_fault
from holdfast.state.capture import Capture
from holdfast.state.local_boxes import local, local_box

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
WORLD = 4
SHAPES = {"a": (7, 8), "b": (3, 4), "whole": (2,)}
KEYS = ("exp_avg", "exp_avg_sq")


def sharded(shape, dim, group=None):
    """Return a ShardedTensor: cut along ``dim`` as torch does, or into a grid of two by two.

    ``halves``: into two, the first of them on rank 1 and the other one on rank 3.
    """
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

    ranks = range(dist.get_world_size(group))
    if isinstance(dim, int):
        spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])
    else:
        (rows, columns), whole_row = ((0, n // 2, n) for n in shape), (0, shape[1])
        grid = itertools.product(pairwise(rows), pairwise(columns))
        boxes = enumerate(grid)
        if dim == "halves":
            boxes = zip((1, 3), [(row, whole_row) for row in pairwise(rows)], strict=True)
        spec = EnumerableShardingSpec(
            [
                ShardMetadata([r[0], c[0]], [r[1] - r[0], c[1] - c[0]], f"rank:{rank}/cpu")
                for rank, (r, c) in boxes
            ]
        )
    return sharded_tensor.zeros(spec, *shape, process_group=group)


class Parts(nn.Module):
    """Tensors of these names, as parameters."""


def with_shards(dim):
    """Return a module with parameters that torch has cut, as ``shard_parameter`` does."""
    module = plain()
    for name in "ab":
        made = sharded(SHAPES[name], dim)
        for shard in made.local_shards():
            shard.tensor.requires_grad_(True)
        module.register_parameter(name, nn.Parameter(made))
    return module


def plain():
    module = Parts()
    for name, shape in SHAPES.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def of_mesh():
    module = plain()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=(f"r{dist.get_rank()}",)
    )
    return fully_shard(module, mesh=mesh)


KINDS = {
    "rows": lambda: with_shards(0),
    "columns": lambda: with_shards(1),
    "grid": lambda: with_shards("grid"),
    "halves": lambda: with_shards("halves"),
    "fsdp2": of_mesh,
    "alone": plain,
}


def state(kind, *, filled):
    """Return a rank's module and optimizer, and what is here of which parameter, by its name."""
    from torch.distributed._shard.sharded_optim import ShardedOptimizer

    module = KINDS[kind]()
    if kind in ("fsdp2", "alone"):
        optimizer = torch.optim.AdamW(module.parameters())
        here = dict(module.named_parameters())
    else:
        named = dict(module.named_parameters())
        optimizer = ShardedOptimizer(named, torch.optim.AdamW)
        here = {"whole": module.whole}
        for name in "ab":
            here.update((name, shard.tensor) for shard in named[name].local_shards())
    Capture({"m": module}, rank=dist.get_rank(), world_size=dist.get_world_size())
    for name, p in here.items():
        moments = {key: torch.zeros_like(p) for key in KEYS}
        for key, tensor in ({"w": p, **moments} if filled else {}).items():
            box = local_box("p", p).box
            local(tensor).detach().copy_(part(numbered(key, name, SHAPES[name]), box))
            optimizer.state[p] = {"step": torch.tensor(5.0), **moments}
    return {"m": module, "o": optimizer}, here


def check(held, here):
    here = {name: p for name, p in here.items() if local(p).numel()}
    for name, p in here.items():
        kept = held["o"].state[p]
        assert kept.keys() == {"step", *KEYS}
        assert float(kept["step"]) == 5.0
        for key, tensor in {"w": p, **{key: kept[key] for key in KEYS}}.items():
            expected = part(numbered(key, name, SHAPES[name]), local_box("p", p).box)
            assert torch.equal(expected, local(tensor)), (name, key)


@pytest.mark.parametrize("kind", ["rows", "columns", "grid", "halves"])
def test_all_ranks_together_save_every_element_once(world, tmp_path, kind):
    """A rank without a shard says so."""
    located = saved_by(tmp_path, world, lambda _: state(kind, filled=True)[0])
    headers = headers_of(located)

    assert first_fault(headers) == unlike_ranks(shard for _, shard in located) == ""
    for tensor in index.build(headers).tensors:
        boxes = [held.box for held in tensor.boxes]
        assert covers(whole(tensor.shape), boxes), tensor.fqn
        if tensor.shape and "whole" not in tensor.fqn:
            elements = torch.Size(tensor.shape).numel()
            assert sum(box.elements_count for box in boxes) == elements, tensor.fqn


@pytest.mark.parametrize(
    ("before", "ranks_before", "after", "ranks_after"),
    [
        ("rows", 4, "rows", 4),
        ("rows", 4, "columns", 3),
        ("rows", 2, "rows", 4),
        ("grid", 4, "rows", 3),
        ("columns", 4, "grid", 4),
        ("grid", 4, "grid", 4),
        ("columns", 3, "fsdp2", 4),
        ("halves", 4, "halves", 4),
        ("halves", 4, "rows", 3),
        ("rows", 3, "halves", 4),
        ("fsdp2", 4, "grid", 4),
        ("rows", 4, "alone", 1),
        ("alone", 1, "columns", 4),
    ],
)
def test_shards_are_restored_into_each_other(
    world, tmp_path, before, ranks_before, after, ranks_after
):
    """From what each rank names by bytes; names are those of a module that nobody has cut."""
    saved = Saved(tmp_path, world, lambda _: state(before, filled=True)[0], ranks_before)
    here = {}

    def make(_):
        held, found = state(after, filled=False)
        here.update(found)
        return held

    for rank in range(ranks_after):
        here.clear()
        check(load(saved, world, make, rank, ranks_after), here)


def test_what_its_optimizer_writes_is_copied_after_the_save_has_returned(world):
    world(1)
    held, here = state("grid", filled=True)
    plan = planned(held)

    assert [] == plan.eager
    assert len(plan.versions()) == len(here)
    capture = Capture(held, rank=1, world_size=WORLD)
    assert [held["o"]._optim] == list(capture.optimizers)


@pytest.mark.parametrize("what", ["tensor", "shard"])
def test_a_tensor_or_shard_that_is_another_one_makes_another_plan(world, what):
    world(1)
    held, _ = state("rows", filled=True)
    plan = planned(held)
    assert plan.is_current()
    if what == "tensor":
        held["m"]._parameters["a"] = nn.Parameter(sharded(SHAPES["a"], 0))
    else:
        shard = held["m"].a.local_shards()[0]
        shard.tensor = shard.tensor.clone()

    assert not plan.is_current()


def test_an_attribute_that_torchs_hook_puts_into_the_state_is_state(world, tmp_path):
    """Of the module that has the hook, and of those in it; elsewhere it is no more than a value."""
    from torch.distributed._shard.sharded_tensor import state_dict_hook

    def make(value):
        inner, other = nn.Module(), nn.Module()
        inner.table, other.table = (sharded((6, 2), 0) for _ in range(2))
        for module in (inner, other):
            module.table.local_shards()[0].tensor.fill_(value)
        outer = nn.Module()
        outer.inner = inner
        outer._register_state_dict_hook(state_dict_hook)
        return {"m": nn.ModuleDict({"outer": outer, "other": other})}

    saved = Saved(tmp_path, world, lambda rank: make(rank + 1.0), 3)
    for rank in range(2):
        held = load(saved, world, lambda _: make(0.0), rank, 2)["m"]
        rows = held["outer"].inner.table.local_shards()[0].tensor
        assert ([1.0, 1.0, 2.0], [2.0, 3.0, 3.0])[rank] == rows[:, 0].tolist()
        assert not held["other"].table.local_shards()[0].tensor.any()


def test_shards_of_some_ranks_are_those_of_a_mesh(world, tmp_path):
    def make(value):
        group = dist.new_group([0, 1])
        module = nn.Module()
        if dist.get_rank() < 2:
            made = sharded((5, 2), 0, group)
            made.local_shards()[0].tensor.fill_(value)
            module.register_parameter("w", nn.Parameter(made))
        return {"m": module}

    located = saved_by(tmp_path, world, lambda rank: make(rank + 1.0))
    names = {e.spec.fqn: e.spec.box for h in headers_of(located) for e in h.entries}
    assert names["rank.0.m.w"] in (Box((0, 0), (3, 2)), Box((3, 0), (2, 2)))
    saved = Saved(tmp_path, world, lambda rank: make(rank + 1.0), WORLD)
    for rank in range(2):
        held = load(saved, world, lambda _: make(0.0), rank, WORLD)["m"]
        assert (held.w.local_shards()[0].tensor == rank + 1.0).all()


def test_several_shards_on_a_rank_are_refused_with_the_cure(world):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    world(1)
    places = [f"rank:{rank}/cpu" for rank in (0, 1, 2, 3, 0, 1)]
    module = Parts()
    module.register_parameter(
        "w", nn.Parameter(sharded_tensor.zeros(ChunkShardingSpec(0, places), 12, 2))
    )
    with pytest.raises(InvalidRequestError) as refused:
        Capture({"m": module}, rank=1, world_size=WORLD)

    assert "tensor 'm.w' is a ShardedTensor of which this rank has 2 shards" in str(refused.value)
    assert "give each rank one shard, or make it a DTensor" in str(refused.value)


def test_one_of_its_own_is_refused_with_the_cure(world):
    world(0)
    with pytest.raises(InvalidRequestError, match="put the module that has it into the state"):
        Capture({"t": sharded((4, 4), 0)}, rank=0, world_size=WORLD)
