"""Whose tensor a name means where only some ranks have saved one of their own, or lead a group."""

import json

import pytest
from tests.unit.state.test_needs_over_meshes import Saved
from tests.unit.state.test_whose_tensor import STAGES, Parts, ddp, filled, load, over, plain
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.blob import decode
from holdfast.state.capture import Capture
from holdfast.state.owners import Owners


def replicated(_rank):
    return {"m": DistributedDataParallel(Parts(layer=filled(0.0)))}


def sharded(rank):
    layer = filled(0.0)
    fully_shard(layer, mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"again{rank}",)))
    return {"m": Parts(layer=layer)}


def values_in(module):
    """Return the value of each layer's weight; all of one is the same."""
    found = []
    for parameter in module.parameters():
        here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        values = here.detach().unique().tolist()
        if parameter.ndim > 1:
            assert len(values) == 1
            found += values
    return found


def of_some(*ranks):
    """Return what makes the state of a rank, of which only ``ranks`` have a layer, each its own."""
    return lambda rank: {"m": Parts(**({"layer": filled(float(rank))} if rank in ranks else {}))}


@pytest.mark.parametrize("again", [replicated, sharded])
def test_what_one_rank_alone_had_becomes_what_all_hold_together(world, tmp_path, again):
    """Whoever of several ranks has a tensor now, it may be any rank's of those that saved."""
    saved = Saved(tmp_path, world, of_some(1), 2)
    for rank in range(2):
        assert values_in(load(saved, world, again, rank, 2)["m"]) == [1.0]


@pytest.mark.parametrize("again", [replicated, sharded])
def test_what_two_ranks_alone_had_becomes_what_all_hold_only_if_equal(world, tmp_path, again):
    saved = Saved(tmp_path, world, of_some(1, 2), 3)
    with pytest.raises(InvalidRequestError, match=r"m\.layer\..* by several groups of ranks"):
        load(saved, world, again, 0, 2)


def test_a_stage_of_one_rank_is_compared_with_a_stage_of_two(world, tmp_path):
    """The group of rank 0 is not taken for the model of all, whatever the others begin with."""

    def make(rank):
        layer = over(([0, 1], [2]), filled(float(rank // 2)))
        return {"m": layer if rank < 2 else layer.module}

    saved = Saved(tmp_path, world, make, 3)
    with pytest.raises(InvalidRequestError, match=r"m\.weight.* by several groups of ranks"):
        load(saved, world, plain, 0, 1)


def of_leaders(rank):
    """A stage of two ranks, of which some have a head as well, each its own."""
    state = {"m": over(STAGES, filled(5.0))}
    return state | ({"head": filled(float(rank))} if rank in (0, 2, 3) else {})


def test_a_rank_that_leads_a_group_has_its_own_tensors_again(world, tmp_path):
    """The very same script goes on, though what leaders have differs, and some have nothing."""
    saved = Saved(tmp_path, world, of_leaders, 4)
    for rank in (0, 2, 3):
        assert (load(saved, world, of_leaders, rank, 4)["head"].weight == rank).all()


def test_a_rank_that_leads_a_group_takes_what_every_rank_has_of_its_own(world, tmp_path):
    """Fewer ranks: a group has saved one tensor, so what all have is no group's."""

    def make(rank):
        return {"t": over(STAGES, filled(5.0)), "m": filled(float(rank))}

    saved = Saved(tmp_path, world, make, 4)
    state = load(saved, world, lambda _: {"t": filled(0.0), "m": filled(9.0)}, 0, 2)
    assert values_in(state["m"]) == [0.0]


def test_a_rank_that_leads_no_group_takes_its_own_on_fewer_ranks(world, tmp_path):
    """The rule for ranks' own state: nobody's but the source's, whoever else has one."""

    def make(rank):
        return {"m": filled(float(rank))} if rank < 2 else {}

    saved = Saved(tmp_path, world, make, 3)
    for rank in range(2):
        assert values_in(load(saved, world, make, rank, 2)["m"]) == [rank]


def test_a_rank_inside_a_group_that_another_one_leads_takes_its_own(world, tmp_path):
    def make(rank):
        return {"t": over(STAGES, filled(5.0)), **({"m": filled(rank)} if rank in (1, 3) else {})}

    def again(_):
        return {"t": filled(0.0), "m": filled(0.0)}

    saved = Saved(tmp_path, world, make, 4)
    state = load(saved, world, again, 1, 2)
    assert values_in(state["m"]) == [1.0]
    assert (state["t"].weight == 5.0).all()


def test_a_group_of_one_rank_is_that_rank(world, tmp_path):
    """Its tensors are its own, whoever else has a group of one."""

    def make(rank):
        module = over(([0], [1], [2]), filled(float(rank)))
        return {"m": module} if rank < 2 else {}

    saved = Saved(tmp_path, world, make, 3)
    for rank in range(2):
        assert values_in(load(saved, world, plain, rank, 2)["m"]) == [rank]


def test_a_leader_takes_what_all_have_and_what_is_nowhere_is_named(world, tmp_path):
    """Fewer ranks: it has saved nothing of its own of either."""

    def make(rank):
        return {"t": over(STAGES, filled(5.0)), **ddp(rank)}

    def again(_):
        return {"t": filled(0.0), "m": filled(1.0)}

    saved = Saved(tmp_path, world, make, 4)
    state = load(saved, world, again, 0, 1)
    assert values_in(state["m"]) == [0.0]
    with pytest.raises(NotReadyError, match=r"t\.other\.weight"):
        load(saved, world, lambda _: {"t": Parts(other=filled(0.0)), "m": filled(1.0)}, 0, 1)


def test_a_plain_model_finds_what_another_section_had_tied(world, tmp_path):
    """The source's own text says nothing of the second name."""

    def make(rank):
        tied = filled(3.0)
        parts = {"a": filled(1.0)} if rank == 0 else {"b": tied, "c": tied}
        return {"m": holdfast.Section(Parts(**parts))}

    saved = Saved(tmp_path, world, make, 2)
    state = load(
        saved, world, lambda _: {"m": Parts(a=filled(0.0), b=filled(0.0), c=filled(0.0))}, 0, 1
    )
    assert values_in(state["m"]) == [1.0, 3.0, 3.0]


class Silent(Capture):
    """Writes texts as versions did that did not list the groups of ranks."""

    def static_text(self, survey):
        text = json.loads(super().static_text(survey))
        del text["meshes"]
        return json.dumps(text).encode()


def test_a_rank_whose_text_lists_no_groups_may_have_saved_for_one(world, tmp_path):
    """What it has is not left out as its own, and is found on other ranks."""

    def make(rank):
        return {"m": Parts(**{f"layer{rank}": filled(float(rank))})}

    def again(_):
        return {"m": Parts(layer0=filled(9.0), layer1=filled(9.0))}

    saved = Saved(tmp_path, world, make, 2, capture=Silent)
    state = load(saved, world, again, 0, 1)
    assert values_in(state["m"]) == [0.0, 1.0]


def owners(segments, source, **options):
    blob = decode(segments.blob(source))
    return Owners(segments, blob, source, world_size=3, **options)


def test_a_part_tells_of_nobody_unless_it_was_chosen_by_all_headers(world, tmp_path):
    """What it lacks may be another rank's; once all were asked, it is nowhere."""
    saved = Saved(tmp_path, world, of_some(0), 2)
    with saved.segments([1]) as segments:
        with pytest.raises(NotReadyError, match=r"which ranks saved 'm\.layer\.weight'"):
            owners(segments, 1).find("m.layer.weight", None)
        assert [] == owners(segments, 1, knows_all=True).find("m.layer.weight", None)


def test_the_text_of_each_rank_that_is_here_is_told_once_and_read_once(world, tmp_path):
    """The source's first: of several that fit it is the one that is meant."""
    saved = Saved(tmp_path, world, of_some(0, 1, 2), 4)
    with saved.segments([0, 1, 3]) as segments:
        of = owners(segments, 1)
        first, again = list(of.texts()), list(of.texts())
    assert [1, 0, 3] == [rank for rank, _ in first]
    assert all(text is same for (_, text), (_, same) in zip(first, again, strict=True))


class Counted(nn.Linear):
    """A layer whose extra state is its number."""

    number = -1

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]


def counted(number):
    layer = Counted(2, 2)
    layer.number = number
    return layer


def test_extra_states_of_layers_that_sections_had_are_found_by_a_plain_model(world, tmp_path):
    """As their tensors are: each is in the text of another rank."""

    def make(rank):
        return {"m": holdfast.Section(Parts(**{f"layer{rank}": counted(rank)}))}

    def again(_):
        return {"m": Parts(layer0=counted(-1), layer1=counted(-1))}

    saved = Saved(tmp_path, world, make, 2)
    layers = load(saved, world, again, 0, 1)["m"].children()
    assert [layer.number for layer in layers] == [0, 1]


def test_the_extra_state_of_a_layer_that_a_plain_model_had_is_found_by_a_section(world, tmp_path):
    """As its tensors are: rank 2 takes the state of rank 0, which had another layer."""
    saved = Saved(tmp_path, world, lambda rank: {"m": Parts(**{f"layer{rank}": counted(rank)})}, 2)
    state = load(saved, world, lambda _: {"m": holdfast.Section(Parts(layer1=counted(-1)))}, 2, 3)
    assert state["m"].module.layer1.number == 1
