"""Few rows, or none, on four ranks: from every mesh into every other, all of it and in parts."""

from __future__ import annotations

import pytest
import torch
from tests.unit.state.test_needs_over_meshes import Saved
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.state.capture import Capture
from holdfast.state.local_boxes import local, local_box

SHAPES = {"rows3": (3, 5), "row": (1, 2), "none": (0, 4), "column": (5, 1), "flat": (6,)}
MESHES = {
    "rows of 4": ((4,), [Shard(0)]),
    "rows of 2": ((2,), [Shard(0)]),
    "rows of 3": ((3,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "grid": ((2, 2), [Shard(0), Shard(1)]),
    "copies": ((2, 2), [Replicate(), Shard(0)]),
    "alone": ((1,), [Replicate()]),
}
KEPT = {"": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}


def numbered(number, shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + number


def made(mesh, rank, *, values=True, shapes=SHAPES):
    """Return a rank's model and what AdamW keeps of it; without values, -1 and an empty state."""
    sizes, placements = MESHES[mesh]
    names = tuple(f"{axis}{rank}.{mesh}" for axis in "ab")[: len(sizes)]
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = nn.Module()
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    optimizer.param_groups[0]["params"].clear()
    for number, (name, shape) in enumerate(shapes.items()):
        cut = [Shard(0) if p.is_shard() and p.dim >= len(shape) else p for p in placements]
        kept = {
            key: distribute_tensor(numbered(number + add, shape), grid, cut, src_data_rank=None)
            for key, add in KEPT.items()
        }
        parameter = nn.Parameter(kept.pop(""))
        setattr(model, name, parameter)
        optimizer.param_groups[0]["params"].append(parameter)
        if values:
            optimizer.state[parameter] = {"step": torch.tensor(float(number)), **kept}
        else:
            local(parameter).detach().fill_(-1.0)
    return {"m": model, "o": optimizer, "extra": {"lr": float(values)}}


def check(state, *, model=True, optimizer=True):
    """Compare all that was loaded with what was saved, and the rest with what it was."""
    for number, name in enumerate(SHAPES):
        parameter = getattr(state["m"], name)
        box = local_box(name, parameter).box
        region = tuple(map(slice, box.offsets, box.stops))
        found = {"": parameter, **state["o"].state.get(parameter, {})}
        assert float(found.pop("step", -1)) == (number if optimizer else -1), name
        assert len(found) == (len(KEPT) if optimizer else 1)
        for key, tensor in found.items():
            here = numbered(number + KEPT[key], SHAPES[name])[region]
            expected = torch.full_like(here, -1.0) if key == "" and not model else here
            assert torch.equal(expected, local(tensor.detach())), (name, key)


def world_size_of(mesh):
    return torch.Size(MESHES[mesh][0]).numel()


def load(saved, capture, only=None, *, strict=True):
    """Load what the rank has named, and no other byte; a rank without boxes names nothing."""
    if strict and capture.boxes is not None:
        saved.load(capture, saved.needs(capture, only), only)
        return None
    with saved.segments(range(saved.world_size)) as segments:
        return capture.load(segments, step=1, only=only, strict=strict, streams=only is None)


@pytest.mark.parametrize("there", MESHES)
def test_shapes_that_do_not_divide_go_from_each_mesh_to_each_other(world, tmp_path, there):
    saved = Saved(tmp_path, world, lambda rank: made(there, rank), world_size_of(there))
    for here in MESHES:
        size = world_size_of(here)
        for rank in range(size):
            world(rank, size)
            state = made(here, rank, values=False)
            load(saved, Capture(state, rank=rank, world_size=size))

            check(state)
            assert state["extra"] == {"lr": 1.0}


MOVES = [("rows of 4", "rows of 2"), ("rows of 2", "rows of 3"), ("grid", "rows of 3")]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("only", [["m"], ["o"], ["m", "o"]], ids="".join)
@pytest.mark.parametrize(("there", "here"), MOVES)
def test_a_part_is_loaded_on_another_mesh_and_the_rest_stays(
    world, tmp_path, there, here, only, strict
):
    saved = Saved(tmp_path, world, lambda rank: made(there, rank), world_size_of(there))
    size = world_size_of(here)
    for rank in range(size):
        world(rank, size)
        state = made(here, rank, values=False)
        load(saved, Capture(state, rank=rank, world_size=size), only, strict=strict)

        check(state, model="m" in only, optimizer="o" in only)
        assert state["extra"] == {"lr": 0.0}


MORE = {**SHAPES, "rows4": (4, 2)}


@pytest.mark.parametrize(("there", "here"), MOVES)
def test_what_is_only_here_or_only_there_is_named_on_another_mesh(world, tmp_path, there, here):
    """Strict refuses it with the nearest name and changes nothing; else the rest is loaded."""
    size = world_size_of(here)
    for folder, before, now, refusal in (
        ("lacks", SHAPES, MORE, NotReadyError), ("has", MORE, SHAPES, InvalidRequestError),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        saved = Saved(
            tmp_path / folder, world,
            lambda rank, shapes=before: {"m": made(there, rank, shapes=shapes)["m"]},
            world_size_of(there),
        )  # fmt: skip
        for rank in range(size):
            world(rank, size)
            state = made(here, rank, values=False, shapes=now)
            capture = Capture({"m": state["m"]}, rank=rank, world_size=size)
            named = pytest.raises(refusal, match=r"'m\.rows4'.* exists only in the")
            with saved.segments(range(saved.world_size)) as segments, named:
                capture.load(segments, step=1)
            check(state, model=False, optimizer=False)

            found = load(saved, capture, strict=False)

            check(state, optimizer=False)
            assert ("m.rows4",) == (found.missing if now is MORE else found.unexpected)
