"""Whose tensor a restore takes where ranks or groups of ranks have saved one name; never a mix."""

import pytest
import torch
import torch.distributed as dist
from tests.unit.state import test_sections as sections
from tests.unit.state.test_needs_over_meshes import Saved
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.state.capture import Capture


def filled(value):
    layer = nn.Linear(2, 2)
    for p in layer.parameters():
        nn.init.constant_(p, value)
    return layer


class Parts(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def over(ranks, module):
    """Return ``module`` with DDP over the group of this rank, of groups of ranks."""
    groups = [dist.new_group(group) for group in ranks]
    at = next(n for n, group in enumerate(ranks) if dist.get_rank() in group)
    return DistributedDataParallel(module, process_group=groups[at])


STAGES, ROWS = ([0, 1], [2, 3]), ([0, 2], [1, 3])


def of_groups(groups, *, alike=False):
    """Return what gives a rank's state: each group has saved other values, or not."""

    def make(rank):
        at = next(n for n, group in enumerate(groups) if rank in group)
        return {"m": over(groups, filled(3.0 + (0 if alike else at)))}

    return make


def plain(_rank):
    return {"m": filled(0.0)}


def ddp(_rank):
    return {"m": DistributedDataParallel(filled(0.0))}


def load(saved, world, make, rank, world_size):
    """Load as a rank does: what it names, then more, and all of it if there are no boxes."""
    world(rank, world_size)
    state = make(rank)
    capture = Capture(state, rank=rank, world_size=world_size)
    for far in [False, True] if capture.boxes is not None else []:
        needs = saved.needs(capture, far=far)
        if not needs.whole:
            try:
                saved.load(capture, needs)
            except NotReadyError:
                continue
            return state
    with saved.segments(range(saved.world_size)) as segments:
        capture.load(segments, step=1)
    return state


@pytest.mark.parametrize("groups", [STAGES, ROWS])
@pytest.mark.parametrize(("again", "world_size"), [(plain, 1), (plain, 2), (ddp, 2), (ddp, 4)])
def test_groups_that_differ_are_never_taken_for_the_rank_that_begins_one(
    world, tmp_path, groups, again, world_size
):
    """Defect of an attack: rank 0 took the first stage, or row, for the model of all."""
    saved = Saved(tmp_path, world, of_groups(groups), 4)
    for rank in range(world_size):
        with pytest.raises(InvalidRequestError, match=r"m\.weight.* by several groups of ranks"):
            load(saved, world, again, rank, world_size)


@pytest.mark.parametrize("cast", [lambda layer: layer.half(), lambda _layer: nn.Linear(2, 3)])
def test_groups_whose_tensors_are_of_other_kinds_are_refused_as_different(world, tmp_path, cast):
    """Before any of them is read: bits of another dtype or shape cannot be compared."""

    def make(rank):
        layer = filled(3.0)
        return {"m": over(STAGES, cast(layer) if rank in STAGES[1] else layer)}

    saved = Saved(tmp_path, world, make, 4)
    with pytest.raises(InvalidRequestError, match=r"m\.weight.* by several groups of ranks"):
        load(saved, world, plain, 0, 1)


@pytest.mark.parametrize(("again", "world_size"), [(plain, 1), (plain, 2), (ddp, 2), (ddp, 4)])
def test_groups_that_are_alike_become_the_model_of_all(world, tmp_path, again, world_size):
    saved = Saved(tmp_path, world, of_groups(ROWS, alike=True), 4)
    for rank in range(world_size):
        state = load(saved, world, again, rank, world_size)
        assert all((p == 3.0).all() for p in state["m"].parameters())


def test_models_of_ranks_that_differ_do_not_become_one_of_ddp(world, tmp_path):
    """Defect of an attack: each rank took its own, and DDP trained two models as one."""
    saved = Saved(tmp_path, world, lambda rank: {"m": filled(float(rank))}, 2)
    for rank in range(2):
        with pytest.raises(InvalidRequestError, match="by several groups of ranks"):
            load(saved, world, ddp, rank, 2)
        assert (load(saved, world, plain, rank, 2)["m"].weight == rank).all()
    assert (load(saved, world, plain, 0, 1)["m"].weight == 0).all()  # the rule for ranks' own state


def test_models_of_ranks_beside_a_mesh_do_not_become_one_of_ddp(world, tmp_path):
    """The same where a rank names what it needs: it looks at what all have saved."""

    def make(rank, wrap, value):
        body = filled(5.0)
        fully_shard(body, mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"d{rank}{wrap}",)))
        head = filled(value)
        return {"b": body, "m": DistributedDataParallel(head) if wrap else head}

    saved = Saved(tmp_path, world, lambda rank: make(rank, False, float(rank)), 2)
    for rank in range(2):
        with pytest.raises(InvalidRequestError, match="by several groups of ranks"):
            load(saved, world, lambda rank: make(rank, True, 0.0), rank, 2)


def heads(rank, *, wrapped):
    """A stage of two ranks; its head is each rank's, or that of both."""
    number = rank // 2
    names = {"trunk": f"trunk{number}", "head": f"head{number}"}
    if wrapped:
        module = over(STAGES, Parts(trunk=filled(0.0), head=filled(0.0)))
    else:
        module = Parts(trunk=over(STAGES, filled(5.0)), head=filled(float(rank)))
    return {"m": holdfast.Section(module, names)}


def test_what_other_groups_saved_is_not_taken_for_that_of_a_group_with_the_same_first_rank(
    world, tmp_path
):
    """Defect of an attack: the head of rank 0 became that of rank 1, which lost its own."""
    saved = Saved(tmp_path, world, lambda rank: heads(rank, wrapped=False), 4)
    for rank in range(4):
        with pytest.raises(InvalidRequestError, match="by several groups of ranks"):
            load(saved, world, lambda rank: heads(rank, wrapped=True), rank, 4)
        state = load(saved, world, lambda rank: heads(rank, wrapped=False), rank, 4)
        assert (state["m"].module.head.weight == rank).all()


def test_what_a_rank_has_as_its_own_is_no_part_of_another_ones_model(world, tmp_path):
    """Defect of an attack: one layer came from rank 0 and one from rank 1, without a Section."""

    def make(rank):
        return {"m": Parts(**{"first": filled(rank), f"layer{rank}": filled(5.0)})}

    def again(_):
        return {"m": Parts(first=filled(0.0), layer0=filled(0.0), layer1=filled(0.0))}

    saved = Saved(tmp_path, world, make, 2)
    with pytest.raises(NotReadyError, match=r"m\.layer1\.weight"):
        load(saved, world, again, 0, 1)


def test_layers_that_another_stage_had_tied_are_found_by_either_name(world, tmp_path):
    """Defect of an attack: only the text of the source's rank was asked for second names."""

    def make(rank):
        tied = filled(3.0)
        parts = {"a": filled(1.0)} if rank == 0 else {"b": tied, "c": tied}
        return {"m": holdfast.Section(Parts(**parts))}

    saved = Saved(tmp_path, world, make, 2)
    for rank, (name, value) in enumerate([("a", 1.0), ("b", 3.0), ("c", 3.0)]):
        state = load(
            saved,
            world,
            lambda _, name=name: {"m": holdfast.Section(Parts(**{name: filled(0.0)}))},
            rank,
            3,
        )
        assert all((p == value).all() for p in state["m"].module.parameters())


def unnamed(count, value=None):
    """An optimizer of parameters that no module of the state has."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    for p in parameters if value is not None else ():
        optimizer.state[p] = {"momentum_buffer": torch.full((2,), value)}
    return {"o": optimizer}


def test_parameters_without_names_are_not_put_together_of_several_ranks(world, tmp_path):
    """Defect of an attack: the third of another rank was taken for the third of this one."""
    saved = Saved(tmp_path, world, lambda rank: unnamed(2 + 2 * rank, float(rank)), 2)
    with pytest.raises(InvalidRequestError, match="has other parameters than when it was saved"):
        load(saved, world, lambda _: unnamed(4), 0, 2)


def test_settings_of_an_optimizer_without_state_are_there_without_its_model(world, tmp_path):
    """Defect of an attack: with only=["optimizer"] nothing told whose text has them."""

    def make(stages):
        def state(rank):
            found = sections.section(rank, stages)
            optimizer = torch.optim.SGD(found["model"].module.parameters(), lr=1 / stages)
            return {"model": found["model"], "optimizer": optimizer}

        return state

    saved = Saved(tmp_path, world, make(4), 4)
    for rank in range(2):
        world(rank, 2)
        state = make(2)(rank)
        capture = Capture(state, rank=rank, world_size=2)
        saved.load(capture, saved.needs(capture, ["optimizer"]), ["optimizer"])
        assert state["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("names", [{"a": 1}, {0: "x"}, "ab", {"a.": "x", "a": "y"}])
def test_names_of_a_section_that_are_no_map_of_texts_are_refused(names):
    with pytest.raises(InvalidRequestError, match="names of a Section"):
        holdfast.Section(filled(0.0), names)


def test_groups_that_begin_with_the_same_rank_but_are_others_are_compared(world, tmp_path):
    saved = Saved(tmp_path, world, of_groups(STAGES), 4)
    for rank in range(4):
        with pytest.raises(InvalidRequestError, match="by several groups of ranks"):
            load(saved, world, of_groups(([0, 3], [1, 2])), rank, 4)
