"""A world of ranks of which this process is one at a time."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 4


@pytest.fixture
def world():
    """Make this process one rank of several; the others are not there, so nothing is computed."""

    def become(rank, world_size=WORLD):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()
