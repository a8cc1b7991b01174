"""On another number of ranks the heads of those who had its part tell a rank all that it loads."""

import pytest
import torch
from tests.unit.state.test_needs_over_meshes import Saved
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.boxes import Box, intersect
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.capture import Capture
from holdfast.state.survey import CapturedTensor, Home

WORLDS = [(2, 4), (4, 2), (4, 6), (8, 3), (3, 8)]
CUTS = {
    "even": ((24, 3), 0), "uneven": ((25, 2), 0), "columns": ((3, 13), 1), "few": ((2, 3), 0),
    "one": ((1, 5), 0), "flat": ((50,), 0), "none": ((0, 4), 0),
}  # fmt: skip


def full(name):
    shape, _ = CUTS[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + len(name)


def mesh_of(rank, *sizes):
    # Meshes of one name are equal, and torch gives one rank's out where it knows another's.
    names = tuple(f"{axis}{rank}.{len(sizes)}.{sizes[0]}" for axis in "ab"[: len(sizes)])
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def job(rank, *sizes, zero=False, more=None):
    """A model cut over the ranks, on copies if there are two sizes, and what AdamW keeps of it."""
    mesh = mesh_of(rank, *sizes)
    model = nn.Module()
    if more is not None:
        beside = distribute_tensor(torch.ones(2, 3), mesh, [more], src_data_rank=None)
        model.more = nn.Parameter(beside)
    for name, (_, dim) in CUTS.items():
        placements = [*[Replicate()] * (len(sizes) - 1), Shard(dim)]
        rows = full(name) * (not zero)
        cut = distribute_tensor(rows, mesh, placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(cut))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in [] if zero else model.parameters():
        moments = {key: p.detach() * n for n, key in enumerate(("exp_avg", "exp_avg_sq"), 2)}
        optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def check(loaded, rank, *sizes):
    expected = job(rank, *sizes)
    pairs = zip(loaded["model"].parameters(), expected["model"].parameters(), strict=True)
    for found, wanted in pairs:
        assert torch.equal(found.to_local(), wanted.to_local())
        state = loaded["optimizer"].state[found]
        for key, value in expected["optimizer"].state[wanted].items():
            held = (t.to_local() if hasattr(t, "to_local") else t for t in (state[key], value))
            assert torch.equal(*held)


class Asked(Saved):
    """Notes whose heads were asked for, in order."""

    def heads(self, checkpoint, ranks):
        self.asked.append(sorted(ranks))
        return super().heads(checkpoint, ranks)


@pytest.mark.parametrize(("before", "now"), WORLDS)
def test_each_rank_loads_its_boxes_by_the_heads_of_those_that_had_them(
    world, tmp_path, before, now
):
    """F80: even and uneven rows, columns, few rows for many ranks; nobody else is asked."""
    saved = Asked(tmp_path, world, lambda rank: job(rank, before), before)
    seen = set()
    for rank in range(now):
        world(rank, now)
        state = job(rank, now, zero=True)
        capture = Capture(state, rank=rank, world_size=now)
        saved.asked = []
        needs = saved.needs(capture)
        [asked] = saved.asked
        seen.update(asked)

        saved.load(capture, needs)

        check(state, rank, now)
        likely = capture.boxes.likely_savers(before)
        assert set(asked) == likely | {rank % before}
        assert saved.of_all is (len(asked) == before)
    assert seen == set(range(before))  # who saved more than there is here, is heard by somebody


@pytest.mark.parametrize(("before", "now"), WORLDS)
@pytest.mark.parametrize("cut", CUTS)
def test_likely_savers_are_those_whose_boxes_touch_and_rank_0(world, before, now, cut):
    """As torch cuts, not as we think that it does."""
    shape, dim = CUTS[cut]

    def box(rank, world_size):
        """Return the box that torch gives a rank, found by what it has of numbered rows."""
        world(rank, world_size)
        numbers = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
        here = distribute_tensor(
            numbers, mesh_of(rank, world_size), [Shard(dim)], src_data_rank=None
        ).to_local()
        begin = int(here.flatten()[0]) if here.numel() else 0
        place = [0] * len(shape)
        place[dim] = begin
        return Box(tuple(place), (*shape[:dim], here.numel(), *shape[dim + 1 :]))

    had = [box(rank, before) for rank in range(before)]
    for rank in range(now):
        here = box(rank, now)
        held = CapturedTensor(
            "w", torch.empty(0), Home.HOLDERS, False, shape, here, (rank,), tuple(range(now))
        )
        touching = {r for r, one in enumerate(had) if intersect(one, here) is not None}

        assert LocalBoxes({"w": held}, {}).likely_savers(before) == touching | {0}


def test_a_moment_that_a_mate_of_its_rows_saved_is_loaded_by_the_heads_of_all(world, tmp_path):
    """HSDP saved it, so that half of what belongs to a rank's rows is another's."""
    saved = Asked(tmp_path, world, lambda rank: job(rank, 2, 2), 4)
    widened = 0
    for rank in range(3):
        world(rank, 3)
        state = job(rank, 3, zero=True)
        capture = Capture(state, rank=rank, world_size=3)
        saved.asked = []
        needs = saved.needs(capture)
        try:
            saved.load(capture, needs)
        except NotReadyError:  # then a restore names its needs once more
            assert not saved.of_all
            widened += 1
            saved.load(capture, saved.needs(capture, far=True))
        widened += len(saved.asked) - 1

        check(state, rank, 3)
    assert widened


def test_copies_of_rows_may_have_been_saved_by_anybody(world):
    world(1)
    capture = Capture(job(1, 2, 2), rank=1, world_size=4)

    assert capture.boxes.likely_savers(3) is None


@pytest.mark.parametrize(
    ("box", "likely"),
    [
        pytest.param(Box((3,), (5,)), None, id="a range"),
        pytest.param(Box((4, 3), (4, 3)), None, id="a grid"),
        pytest.param(Box((0, 0), (0, 0)), {0}, id="nothing"),
        pytest.param(Box((4, 0), (4, 6)), {0, 2, 3}, id="rows"),
    ],
)
def test_only_of_rows_that_one_dim_deals_out_it_is_known_who_had_them(box, likely):
    held = CapturedTensor(
        "w", torch.empty(0), Home.HOLDERS, False, (8, 6), box, (1,), (0, 1, 2, 3)
    )  # fmt: skip

    assert LocalBoxes({"w": held}, {}).likely_savers(4) == likely


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["cut", "whole"])
def test_what_the_model_lacks_now_is_seen_by_all_ranks_or_by_those_who_read_of_it(
    world, tmp_path, placement
):
    """Rank 0 had rows of what was cut, and the one rank that saved a copy is near somebody."""
    saved = Asked(tmp_path, world, lambda rank: job(rank, 4, more=placement), 4)
    refused = {}
    for rank in range(6):
        world(rank, 6)
        saved.asked = []
        capture = Capture(job(rank, 6, zero=True), rank=rank, world_size=6)
        try:
            saved.load(capture, saved.needs(capture))
        except InvalidRequestError as error:
            refused[rank] = error.message

    assert refused.keys() == set(range(6)) if placement.is_shard() else refused
    assert all("model.more" in message for message in refused.values())
