"""State that is one rank's piece of something bigger is refused by name, not saved wrongly."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def refusal(state):
    with pytest.raises(InvalidRequestError) as refused:
        Capture(state, rank=0, world_size=1)
    return refused.value.message


def test_a_distributed_tensor_is_refused_with_its_mesh(mesh):
    whole = torch.ones(4, 4)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    expected = "not supported yet: model.weight is a DTensor over mesh (tp=1)"
    assert refusal({"model": model}) == expected
    assert "not supported yet: extra.t is a DTensor" in refusal(
        {"extra": {"t": distribute_tensor(whole, mesh, [Shard(0)])}}
    )


def test_a_fully_sharded_module_is_refused(mesh):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)

    assert refusal({"model": model}) == "not supported yet: model is a FSDPModule"


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own import
def test_an_optimizer_spread_over_ranks_is_refused(mesh):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(
        nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.SGD, lr=0.1
    )

    expected = "not supported yet: optimizer is a ZeroRedundancyOptimizer"
    assert refusal({"optimizer": optimizer}) == expected
