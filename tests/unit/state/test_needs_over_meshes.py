"""What a rank names of a checkpoint over a mesh is enough, and loads what all of it would."""

import pytest
import torch
from tests.unit.state import worlds
from tests.unit.state.test_meshes import stage
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.core.needs import Head, Needs
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture
from holdfast.training.headers import Headers
from holdfast.training.restore_needs import of_boxes


class Saved:
    """A checkpoint that each rank of a world has saved, and what a rank may name of it."""

    def __init__(self, folder, world, make, world_size, *, capture=Capture):
        self.world_size = world_size
        self._located = []
        for rank in range(world_size):
            world(rank, world_size)
            made = capture(make(rank), rank=rank, world_size=world_size)
            self._located.append(worlds.Saver(folder).save(made))

    def heads(self, _, ranks):
        found = []
        for path, shard in self._located:
            data = path.read_bytes()
            if shard.id.rank in ranks:
                head = data[: header_length(data)]
                found.append(Head(rank=shard.id.rank, length_bytes=len(data), data=head))
        return found

    def needs(self, capture, only=None, *, far=False):
        needs, self.of_all = of_boxes(
            Needs(checkpoint=self._located[0][1].id.checkpoint), capture.rank % self.world_size,
            capture.boxes, only, Headers(self.heads),
            saved=self.world_size, world_size=capture.world_size, far=far,
        )  # fmt: skip
        return needs

    def names(self, needs):
        """Return the names of all tensors, as they are stored, of which any byte is named."""
        found = []
        for need in needs.shards:
            data = self._located[need.rank][0].read_bytes()
            header = parse_header(data[: header_length(data)], len(data))
            found += [
                entry.spec.fqn
                for entry in header.entries
                if any(part.begin < entry.end and entry.begin < part.end for part in need.ranges)
            ]
        return found

    def segments(self, ranks, held=None):
        return open_files([self._located[rank] for rank in ranks], held)

    def load(self, capture, needs, only=None):
        """Load from what was named alone, to the byte; it has to be a part."""
        assert not needs.whole
        held = {self._located[need.rank][1].id: need.ranges for need in needs.shards}
        with self.segments([need.rank for need in needs.shards], held) as segments:
            capture.load(segments, step=1, only=only, streams=only is None, knows_all=self.of_all)


def test_a_stage_is_not_given_what_another_one_saved_since_it_sees_no_third(world, tmp_path):
    """Defect of an attack: of two stages it had fetched one, and that is not its own."""
    saved = Saved(tmp_path, world, lambda rank: stage(rank, [rank]), 2)
    world(2, 3)
    capture = Capture(stage(2, [2]), rank=2, world_size=3)

    needs = saved.needs(capture)

    assert [0, 1] == [need.rank for need in needs.shards]
    with pytest.raises(InvalidRequestError, match="by several groups of ranks"):
        saved.load(capture, needs)
    found = {1: NotReadyError, 2: InvalidRequestError}
    for segments_count, refusal in found.items():
        with saved.segments(range(segments_count)) as segments, pytest.raises(refusal):
            capture.load(segments, step=1)


class Scaled(nn.Linear):
    """A layer with a tensor in its extra state, as those that keep scales for 8 bits have."""

    amax = torch.ones(5)

    def get_extra_state(self):
        return {"amax": self.amax}

    def set_extra_state(self, state):
        self.amax = state["amax"]


def small(rank, sizes, layer=nn.Linear):
    """A model on copies of a mesh; on more than two ranks of one its last ranks are empty."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=(f"a{rank}", f"b{rank}")[: len(sizes)])
    model = nn.Sequential(layer(3, 2), nn.Linear(2, 1))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return {"model": model}


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_whose_boxes_are_empty_has_a_header_that_tells_of_them(world, tmp_path, rank):
    """Defect of an attack: its mate had saved that box, and it fetched the whole checkpoint."""
    saved = Saved(tmp_path, world, lambda rank: small(rank, (2, 4)), 8)
    world(rank, 8)
    capture = Capture(small(rank, (2, 4)), rank=rank, world_size=8)

    saved.load(capture, saved.needs(capture))


def test_what_a_module_says_beside_its_tables_is_named_with_it(world, tmp_path):
    """Defect of an attack: with only=["model"] such a module fetched the whole checkpoint."""

    def make(rank):
        return small(rank, (2,), Scaled)

    saved = Saved(tmp_path, world, make, 2)
    world(1, 2)
    state = make(1)
    state["model"][0].amax = torch.zeros(5)
    capture = Capture(state, rank=1, world_size=2)

    saved.load(capture, saved.needs(capture, ["model"]), ["model"])

    assert state["model"][0].amax.sum() == 5


class Summed:
    """What each rank has a part of, and others take over."""

    def __init__(self, own=0):
        self.own = own

    def state_dict(self):
        return {"own": self.own}

    def load_state_dict(self, state):
        self.own = state["own"]

    def load_parts(self, state, parts):
        assert "own" in state
        self.own = sum(part["own"] for part in parts)


@pytest.mark.parametrize(("before", "now", "sums"), [(4, 2, [4, 6]), (2, 4, [1, 2, 0, 0])])
def test_what_ranks_that_are_no_more_had_is_named_and_taken_over(
    world, tmp_path, before, now, sums
):
    """F82: of those who fall to a rank the text alone, not their tensors."""
    saved = Saved(
        tmp_path, world, lambda rank: small(rank, (before,)) | {"sums": Summed(rank + 1)}, before
    )
    found = []
    for rank in range(now):
        world(rank, now)
        state = small(rank, (now,)) | {"sums": Summed()}
        capture = Capture(state, rank=rank, world_size=now)
        saved.load(capture, saved.needs(capture))
        found.append(state["sums"].own)

    assert found == sums


def test_any_number_of_small_tensors_is_few_ranges(world, tmp_path):
    """Defect of an attack: on another mesh each was a range, and 10,001 of them were too many."""

    def make(rank, world_size):
        names = (f"a{rank}.{world_size}",)
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=names)
        model = nn.Module()
        for number in range(200):
            weight = distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)
            setattr(model, f"w{number}", nn.Parameter(weight))
        return {"model": model}

    saved = Saved(tmp_path, world, lambda rank: make(rank, 2), 2)
    world(3, 4)
    capture = Capture(make(3, 4), rank=3, world_size=4)

    needs = saved.needs(capture)

    assert [len(need.ranges) for need in needs.shards] == [1, 1]
    saved.load(capture, needs)
