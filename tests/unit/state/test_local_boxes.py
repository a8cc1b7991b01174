"""Which box of a tensor is on which rank: torch's placements on meshes of four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box, covers, intersect, whole
from holdfast.state.local_boxes import Piece, is_sharded, know_piece, local, local_box

RANKS = range(4)


def on(rank, sizes, names, action):
    """Return what ``action`` makes of a mesh as ``rank`` of four sees it; nobody else is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        return action(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    finally:
        dist.destroy_process_group()


def made(mesh, shape, placements):
    """Return a DTensor as one rank has it; what is in it does not matter."""
    rows = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return distribute_tensor(rows, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(
    ("sizes", "placements", "shape", "copies"),
    [
        ((4,), (Shard(0),), (8, 3), 1),
        ((4,), (Shard(0),), (7, 3), 1),
        ((4,), (Shard(0),), (2, 3), 1),  # two ranks have nothing
        ((4,), (Shard(1),), (3, 5), 1),
        ((4,), (Replicate(),), (3, 5), 4),
        ((4,), (Replicate(),), (), 4),
        ((4,), (Shard(0),), (0, 3), 1),
        ((2, 2), (Replicate(), Shard(0)), (5, 2), 2),
        ((2, 2), (Shard(0), Replicate()), (5, 2), 2),
        ((2, 2), (Shard(0), Shard(1)), (5, 3), 1),
        ((2, 2), (Shard(1), Shard(0)), (5, 3), 1),
        ((2, 2), (Shard(0), Shard(0)), (7, 3), 1),
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (7, 3), 1),
        # Dealt out before a cut that is not there: one rank has all rows, of an axis or of these.
        ((1, 4), (_StridedShard(0, split_factor=2), Replicate()), (7, 3), 4),
        ((4,), (_StridedShard(1, split_factor=3),), (2, 3), 1),
        ((2, 2), (_StridedShard(0, split_factor=4), Replicate()), (3, 2), 2),
    ],
)
def test_the_boxes_of_all_ranks_are_the_tensor_each_as_often_as_it_is_held(
    sizes, placements, shape, copies
):
    """F76, F78, F79: no hole, no overlap; whoever holds the same box is known to each holder."""
    seen = [
        on(rank, sizes, None, lambda mesh: local_box("w", made(mesh, shape, placements)))
        for rank in RANKS
    ]

    assert covers(whole(shape), [here.box for here in seen])
    for rank, here in zip(RANKS, seen, strict=True):
        assert (shape, (0, 1, 2, 3)) == (here.shape, here.mesh)
        assert tuple(here.tensor.shape) == here.box.lengths
        assert rank in here.holders
        for other, there in zip(RANKS, seen, strict=True):
            if other in here.holders:
                assert (here.box, here.holders) == (there.box, there.holders)
            elif here.box.elements_count and there.box.elements_count:
                assert intersect(here.box, there.box) is None
        assert len(here.holders) == copies


def test_the_rows_of_a_strided_shard_are_where_its_box_says():
    """FSDP2 over tensor parallel, uneven: the values tell which rows these are."""
    rows = torch.arange(7.0).view(7, 1)

    def values(mesh):
        tensor = distribute_tensor(rows, mesh["tp"], [Shard(0)], src_data_rank=None)
        inner = tensor.to_local().chunk(2)[mesh.get_local_rank("dp")]
        both = DTensor.from_local(
            inner, mesh, (_StridedShard(0, split_factor=2), Shard(0)),
            run_check=False, shape=rows.shape, stride=rows.stride(),
        )  # fmt: skip
        here = local_box("w", both)
        return here.tensor, rows[here.box.within(whole((7, 1)))]

    for rank in RANKS:
        found, expected = on(rank, (2, 2), ("dp", "tp"), values)
        assert torch.equal(expected, found)


def test_a_tensor_on_a_part_of_the_ranks_says_which():
    """A LayerNorm outside the plan of tensor parallelism lies on each row of the mesh by itself."""

    def boxed(mesh):
        return local_box("w", made(mesh["dp"], (6,), (Shard(0),)))

    seen = [on(rank, (2, 2), ("dp", "tp"), boxed) for rank in RANKS]

    assert [(0, 2), (1, 3), (0, 2), (1, 3)] == [here.mesh for here in seen]
    assert [(0,), (1,), (2,), (3,)] == [here.holders for here in seen]
    assert [0, 0, 3, 3] == [here.box.offsets[0] for here in seen]


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        (
            (Partial(), Shard(0)),
            "is a Partial(sum) over mesh (dp=2, tp=2)",
        ),
        ((_StridedShard(0, split_factor=2), Replicate()), "lie apart in the whole"),
        ((_StridedShard(0, split_factor=2), Replicate()), "redistribute() it to Shard or"),
        ((_StridedShard(0, split_factor=8), Shard(0)), "lie apart in the whole"),
    ],
)
def test_what_is_no_box_is_refused_with_its_mesh(placements, text):
    def refused(mesh):
        tensor = DTensor.from_local(torch.zeros(4, 2), mesh, placements, run_check=False)
        with pytest.raises(InvalidRequestError) as error:
            local_box("model.w", tensor)
        return error.value.message

    message = on(1, (2, 2), ("dp", "tp"), refused)

    assert "model.w" in message
    assert text in message


def test_few_rows_that_two_axes_deal_out_are_refused():
    """One rank of the second axis has all that are left to it: rows 0 and 2, by the first."""
    dealt = _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=4)

    def refused(mesh):
        tensor = made(mesh, (4, 1), dealt)
        with pytest.raises(InvalidRequestError, match="lie apart in the whole"):
            local_box("w", tensor)
        return local(tensor).flatten().tolist()

    assert on(0, (2, 2), None, refused) == [0.0, 2.0]


def test_a_tensor_whose_ranks_hold_another_size_than_torch_says_is_refused():
    """``from_local`` without the whole shape takes the pieces for even ones."""

    def refused(mesh):
        tensor = DTensor.from_local(torch.zeros(1 + mesh.get_local_rank(), 2), mesh, [Shard(0)])
        with pytest.raises(InvalidRequestError, match="give DTensor"):
            local_box("w", DTensor(tensor._local_tensor[:0], tensor._spec, requires_grad=False))
        return True

    assert on(1, (4,), None, refused)


def test_a_tensor_of_other_ranks_is_refused():
    def refused(_mesh):
        theirs = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2), theirs, [Shard(0)], run_check=False)
        with pytest.raises(InvalidRequestError, match="lies on other ranks"):
            local_box("w", tensor)
        return True

    assert on(3, (4,), None, refused)


def test_a_plain_tensor_is_all_here():
    plain = nn.Parameter(torch.zeros(3, 2))

    here = local_box("w", plain)

    assert here.tensor is plain is local(plain)
    assert (whole((3, 2)), None, False) == (here.box, here.holders, is_sharded(plain))
    assert isinstance(here.box, Box)


def test_a_mesh_whose_ranks_do_not_ascend_is_refused():
    """torch gives rank 0 the first rows and calls them the last ones."""

    def refused(_mesh):
        turned = DeviceMesh("cpu", [3, 2, 1, 0])
        tensor = DTensor.from_local(torch.zeros(2), turned, [Shard(0)], run_check=False)
        with pytest.raises(InvalidRequestError, match=r"'w' lies on ranks \[3, 2, 1, 0\]"):
            local_box("w", tensor)
        return True

    assert on(1, (4,), None, refused)


def test_ranks_of_any_order_may_hold_copies():
    """Nobody deals rows out."""

    def held(_mesh):
        turned = DeviceMesh("cpu", [3, 2, 1, 0])
        return local_box("w", DTensor.from_local(torch.zeros(2), turned, [Replicate()]))

    here = on(1, (4,), None, held)

    assert (whole((2,)), (0, 1, 2, 3)) == (here.box, here.holders)


def test_state_on_a_mesh_tells_its_own_box_whatever_piece_its_parameter_is():
    """Of the same shape as what is here of a flattened parameter: it is no piece of that."""
    parameter = nn.Parameter(torch.zeros(8))
    know_piece(parameter, Piece((4, 4), Box((0,), (8,)), (0,), (0, 1)))

    def action(mesh):
        state = made(mesh, (8,), (Replicate(),))
        return local_box("o.state.w.m", state, parameter), local_box("w", parameter)

    of_state, of_parameter = on(0, (4,), ("a",), action)
    assert (of_state.shape, of_state.box, of_state.holders) == ((8,), whole((8,)), (0, 1, 2, 3))
    assert of_parameter.shape == (4, 4)
