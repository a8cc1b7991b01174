"""Sections of a model: stages of a pipeline and experts, restored on another number of ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from tests.unit.state import worlds
from tests.unit.state.test_needs_over_meshes import Saved
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.shard import unlike_ranks
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format import byte_ranges
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture

LAYERS, WIDTH = 4, 6


class Stage(nn.Module):
    """Some layers of the model, counted from 0; the first has the embedding, the last the head."""

    def __init__(self, first, last):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(first, last))
        if first == 0:
            self.emb = nn.Embedding(5, WIDTH)
        if last == LAYERS:
            self.head = nn.Linear(WIDTH, 5, bias=False)
            self.norm = nn.BatchNorm1d(WIDTH)


def value_of(name):
    """Return the number that a tensor of the model is filled with, whoever holds it."""
    return float(sum(map(ord, name)) % 997)


def fill(module, names, by=value_of):
    """Give each tensor the number of its name in the model, and the optimizer's state another."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    for name, p in module.named_parameters():
        whole = names(name.removeprefix("module."))
        with torch.no_grad():
            p.fill_(by(whole))
        moments = {
            key: torch.full_like(p, by(whole + key), requires_grad=False)
            for key in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[p] = {"step": torch.tensor(3.0), **moments}
    for name, buffer in module.named_buffers():
        buffer.fill_(by(names(name.removeprefix("module."))))
    return optimizer


def section(rank, stages, copies=1, kind="plain", *, by=value_of):
    """Return the state of a rank of a pipeline by hand: ``copies`` ranks hold each stage."""
    each = LAYERS // stages
    number = rank // copies
    module = Stage(number * each, (number + 1) * each)
    names = {f"layers.{i}": f"layers.{number * each + i}" for i in range(each)}
    name = holdfast.Section(module, names).name
    ranks = list(range(number * copies, (number + 1) * copies))
    if kind == "ddp":
        groups = [dist.new_group(range(n * copies, (n + 1) * copies)) for n in range(stages)]
        module = DistributedDataParallel(module, process_group=groups[number])
    elif kind == "fsdp":
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=(f"r{rank}.{stages}",))
        for part in (*module.layers, module):
            fully_shard(part, mesh=mesh)
    optimizer = fill(module, name, by)
    return {"model": holdfast.Section(module, names), "optimizer": optimizer}


def whole_model(by=value_of):
    module = Stage(0, LAYERS)
    return {"model": module, "optimizer": fill(module, str, by)}


def tensors(state):
    """Yield name in the model, tensor and expected number of all that a rank holds."""
    model, optimizer = state["model"], state["optimizer"]
    module = model.module if isinstance(model, holdfast.Section) else model
    of_model = model.name if isinstance(model, holdfast.Section) else str
    for name, p in module.named_parameters():
        whole = of_model(name.removeprefix("module."))
        yield whole, p.detach(), value_of(whole)
        for key in ("exp_avg", "exp_avg_sq"):
            yield whole, optimizer.state[p][key], value_of(whole + key)
        yield whole, optimizer.state[p]["step"], 3.0
    for name, buffer in module.named_buffers():
        whole = of_model(name.removeprefix("module."))
        yield whole, buffer, value_of(whole)


def check(state):
    for name, tensor, value in tensors(state):
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert (here == here.new_tensor(value)).all(), name


def save(folder, world, make, world_size):
    folder.mkdir()
    located = []
    for rank in range(world_size):
        world(rank, world_size)
        capture = Capture(make(rank), rank=rank, world_size=world_size)
        located.append(worlds.Saver(folder).save(capture))
    assert unlike_ranks(shard for _, shard in located) == ""
    return open_files(located)


def other(_name):
    return -1.0


SHAPES = {
    "4 stages": (4, lambda rank, **by: section(rank, 4, **by)),
    "2 stages": (2, lambda rank, **by: section(rank, 2, **by)),
    "2 stages, DDP": (4, lambda rank, **by: section(rank, 2, 2, "ddp", **by)),
    "2 stages, FSDP": (4, lambda rank, **by: section(rank, 2, 2, "fsdp", **by)),
    "1 stage": (1, lambda _rank, **by: section(0, 1, **by)),
    "1 process": (1, lambda _rank, **by: whole_model(**by)),
}


@pytest.mark.parametrize("there", SHAPES)
def test_any_number_of_stages_goes_on_as_any_other(world, tmp_path, there):
    """A stage's layers are renumbered; its optimizer has what belongs to its parameters."""
    saved_size, make = SHAPES[there]
    with save(tmp_path / "s", world, make, saved_size) as segments:
        for world_size, again in SHAPES.values():
            for rank in range(world_size):
                world(rank, world_size)
                state = again(rank, by=other)
                Capture(state, rank=rank, world_size=world_size).load(segments, step=1)

                check(state)
                assert state["optimizer"].param_groups[0]["lr"] == 0.5


def by_hand(rank, *, by=value_of):
    """A stage that does not say what its layers are called in the model."""
    state = section(rank, 2, by=lambda name: by(name) + rank)
    return {"model": state["model"].module, "optimizer": state["optimizer"]}


def test_stages_without_names_of_the_model_are_never_mixed(world, tmp_path):
    """Two ranks saved another ``layers.0`` each; a mesh of both ranks has one."""

    def meshed(rank):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"both{rank}",))
        model = Stage(1, 3)
        fully_shard(model, mesh=mesh)
        return {"model": model}

    with save(tmp_path / "s", world, lambda rank: {"model": by_hand(rank)["model"]}, 2) as segments:
        for rank in range(2):
            world(rank, 2)
            state = meshed(rank)
            with pytest.raises(InvalidRequestError) as refused:
                Capture(state, rank=rank, world_size=2).load(segments, step=1, strict=False)

    text = refused.value.message
    assert "model.layers.0.weight" in text
    assert "the group of rank 0 and by those of rank 1" in text
    assert "holdfast.Section" in text


def test_stages_without_names_of_the_model_come_back_on_the_same_ranks(world, tmp_path):
    with save(tmp_path / "s", world, by_hand, 2) as segments:
        for rank in range(2):
            world(rank, 2)
            state = by_hand(rank, by=other)
            Capture(state, rank=rank, world_size=2).load(segments, step=1)

            weight = state["model"].layers[0].weight
            assert (weight == value_of(f"layers.{2 * rank}.weight") + rank).all()


def test_sections_that_call_different_tensors_alike_are_refused(world, tmp_path):
    """A wrong map: what differs is not one tensor, and none of both is taken."""

    def wrong(rank):
        module = section(rank, 2, by=lambda name: value_of(name) + rank)["model"].module
        return {"model": holdfast.Section(module, {"layers.1": "layers.0", "layers.0": "layers.1"})}

    with save(tmp_path / "s", world, wrong, 2) as segments:
        world(0, 1)
        with pytest.raises(InvalidRequestError, match=r"layers.*they differ, and which is meant"):
            Capture(whole_model(), rank=0, world_size=1).load(segments, step=1, strict=False)


def experts(rank, world_size, *, by=value_of):
    """Experts by hand: each rank has its share of eight."""
    each = 8 // world_size
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(each))
    names = {str(i): f"experts.{rank * each + i}" for i in range(each)}
    optimizer = fill(module, holdfast.Section(module, names).name, by)
    return {"model": holdfast.Section(module, names), "optimizer": optimizer}


@pytest.mark.parametrize("again", [2, 4, 8])
def test_experts_by_hand_are_restored_on_another_number_of_ranks(world, tmp_path, again):
    with save(tmp_path / "s", world, lambda rank: experts(rank, 4), 4) as segments:
        for rank in range(again):
            world(rank, again)
            state = experts(rank, again, by=other)
            Capture(state, rank=rank, world_size=again).load(segments, step=1)

            check(state)


class Tied(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        if "emb" in parts:
            self.emb = nn.Embedding(5, WIDTH)
        if "head" in parts:
            self.head = nn.Linear(WIDTH, 5, bias=False)
        if len(parts) == 2:
            self.head.weight = self.emb.weight


def tied_stage(rank, *, by=value_of):
    module = Tied(("emb", "head")[rank])
    return {"model": holdfast.Section(module), "optimizer": fill(module, lambda _: "tied", by)}


def tied_model(*, by=value_of):
    module = Tied("emb", "head")
    return {"model": module, "optimizer": fill(module, lambda _: "tied", by)}


def test_weights_tied_across_stages_are_one_tensor_of_one_process_and_back(world, tmp_path):
    for number, (size, saved, again_size, again) in enumerate(
        [(2, tied_stage, 1, lambda _, **by: tied_model(**by)),
         (1, lambda _, **by: tied_model(**by), 2, tied_stage)]
    ):  # fmt: skip
        with save(tmp_path / f"s{number}", world, saved, size) as segments:
            for rank in range(again_size):
                world(rank, again_size)
                state = again(rank, by=other)
                Capture(state, rank=rank, world_size=again_size).load(segments, step=1)

                for p in state["model"].parameters() if again_size == 1 else ():
                    assert (p == value_of("tied")).all()
                for kept in state["optimizer"].state.values():
                    assert (kept["exp_avg"] == value_of("tiedexp_avg")).all()


def test_weights_tied_across_stages_that_differ_are_refused(world, tmp_path):
    def apart(rank):
        return tied_stage(rank, by=lambda name: value_of(name) + rank)

    with save(tmp_path / "s", world, apart, 2) as segments:
        world(0, 1)
        with pytest.raises(InvalidRequestError, match="are one tensor here and were saved with"):
            Capture(tied_model(), rank=0, world_size=1).load(segments, step=1)


def test_a_name_that_the_module_does_not_have_is_refused(world):
    world(0, 1)
    with pytest.raises(InvalidRequestError, match=r"section 'model' has no 'layers.7'"):
        Capture({"model": holdfast.Section(Stage(0, 2), {"layers.7": "x"})}, rank=0, world_size=1)


def test_two_tensors_that_a_map_gives_one_name_are_refused(world):
    world(0, 1)
    section = holdfast.Section(Stage(0, 2), {"layers.0": "layers.1"})
    with pytest.raises(InvalidRequestError, match=r"same name 'model.layers.1.weight'"):
        Capture({"model": section}, rank=0, world_size=1)


def test_a_group_with_other_settings_is_not_merged(world, tmp_path):
    def make(rank):
        state = section(rank, 2)
        state["optimizer"].param_groups[0]["lr"] = float(rank)
        return state

    with save(tmp_path / "s", world, make, 2) as segments:
        world(0, 1)
        with pytest.raises(InvalidRequestError, match="in groups with other settings"):
            Capture(whole_model(), rank=0, world_size=1).load(segments, step=1)


def test_a_layer_of_the_model_that_no_stage_saved_is_missing(world, tmp_path):
    with save(tmp_path / "s", world, lambda rank: section(rank, 4), 4) as segments:
        world(0, 1)
        state = whole_model()
        state["model"].more = nn.Linear(1, 1)
        with pytest.raises(NotReadyError, match=r"model\.more"):
            Capture(state, rank=0, world_size=1).load(segments, step=1)


def test_a_layer_that_the_model_lacks_is_named(world, tmp_path):
    """Also of a stage whose rank is not the one whose state is taken."""
    with save(tmp_path / "s", world, lambda rank: section(rank, 4), 4) as segments:
        world(0, 1)
        state = whole_model()
        del state["model"].layers[3]
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
        with pytest.raises(InvalidRequestError, match=r"model\.layers\.3"):
            Capture(state, rank=0, world_size=1).load(segments, step=1)


class Rows(nn.Module):
    """A norm outside of the plan: each row of a grid has it as one of its own."""

    def __init__(self, ranks, name, value):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.constant_(self.norm.weight, value)
        fully_shard(self.norm, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=(name,)))


@pytest.mark.parametrize("alike", [True, False])
def test_a_layer_outside_the_plan_goes_on_with_more_tensor_parallel_ranks(world, tmp_path, alike):
    """Limit of ADR 0034 that has ended: two rows of two before, four of one now."""

    def stepped(model):
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(7.0), **moments}
        return {"m": model, "o": optimizer}

    def before(rank):
        row = rank % 2
        return stepped(Rows([row, row + 2], f"dp{rank}", 3.0 if alike else float(row)))

    with save(tmp_path / "s", world, before, 4) as segments:
        for rank in range(8):
            world(rank, 8)
            model = Rows([rank % 4, rank % 4 + 4], f"dp8{rank}", 0.0)
            state = {"m": model, "o": torch.optim.AdamW(model.parameters())}
            capture = Capture(state, rank=rank, world_size=8)
            if alike:
                capture.load(segments, step=1)
                assert (state["m"].norm.weight.to_local() == 3.0).all()
                assert {7.0} == {float(kept["step"]) for kept in state["o"].state.values()}
            else:
                with pytest.raises(InvalidRequestError, match="they differ"):
                    capture.load(segments, step=1)
                break


class Sequence(nn.Module):
    """A model that torch's tracer can cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs


def traced(rank, stages, *, by=value_of):
    from torch.distributed.pipelining import SplitPoint, pipeline

    each = LAYERS // stages
    at = {f"layers.{n}": SplitPoint.BEGINNING for n in range(each, LAYERS, each)}
    model = Sequence()
    pipe = pipeline(model, (torch.zeros(2, WIDTH),), split_spec=at)
    module = pipe.build_stage(rank, torch.device("cpu")).submod
    return {"model": module, "optimizer": fill(module, str, by)}


@pytest.mark.filterwarnings("ignore")  # torch's tracer
def test_stages_that_torch_has_traced_need_no_names(world, tmp_path):
    with save(tmp_path / "s", world, lambda rank: traced(rank, 4), 4) as segments:
        for world_size in (1, 2):
            for rank in range(world_size):
                world(rank, world_size)
                state = traced(rank, 2, by=other) if world_size == 2 else {"model": Sequence()}
                if world_size == 1:
                    state["optimizer"] = fill(state["model"], str, other)
                Capture(state, rank=rank, world_size=world_size).load(segments, step=1)

                check(state)


@pytest.mark.parametrize("there", ["4 stages", "2 stages, FSDP", "2 stages, DDP", "1 process"])
def test_a_stage_asks_only_for_the_bytes_of_its_own_layers(world, tmp_path, monkeypatch, there):
    """F80: what other stages hold it does not ask for, whoever saved it."""
    monkeypatch.setattr(byte_ranges, "PART_BYTES", 1)  # else small tensors are one range
    saved = Saved(tmp_path, world, SHAPES[there][1], SHAPES[there][0])
    world(1, 2)
    state = section(1, 2, by=other)
    capture = Capture(state, rank=1, world_size=2)

    needs = saved.needs(capture)
    saved.load(capture, needs)

    check(state)
    names = saved.names(needs)
    assert [] == [name for name in names if re.search(r"layers\.[01]\.|emb", name)]
    assert any(name.endswith("layers.3.weight.exp_avg") for name in names)


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)], ids=["fewer", "more"])
def test_stages_that_do_not_say_what_they_are_hear_of_section(world, tmp_path, before, now):
    """What ``strict=False`` would load are layers of another stage, and nobody is told."""
    saved = Saved(tmp_path, world, lambda rank: {"model": stage(rank, before)}, before)
    world(1, now)
    capture = Capture({"model": stage(1, now)}, rank=1, world_size=now)
    with (
        saved.segments(range(before)) as segments,
        pytest.raises((NotReadyError, InvalidRequestError)) as caught,
    ):
        capture.load(segments, step=1)

    assert f"{before} ranks saved it and {now} load it" in caught.value.message
    assert "holdfast.Section(module, names)" in caught.value.message
    assert "strict=False" not in caught.value.message


def test_a_model_that_has_become_deeper_on_other_ranks_is_no_stage(world, tmp_path):
    """Names that no number makes alike are what the script has more or less of."""
    saved = Saved(tmp_path, world, lambda _: {"model": nn.ModuleDict({"a": nn.Linear(2, 2)})}, 4)
    world(1, 2)
    deeper = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with (
        saved.segments(range(4)) as segments,
        pytest.raises(NotReadyError, match="strict=False loads the rest"),
    ):
        Capture({"model": deeper}, rank=1, world_size=2).load(segments, step=1)


def stage(number, stages):
    each = LAYERS // stages
    return Stage(number * each, (number + 1) * each)
