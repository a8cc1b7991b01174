"""A process group of one rank, in this process."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from holdfast.elastic import group, running


@pytest.fixture
def alone():
    """Be the only rank; nothing is left running afterwards."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    with mock.patch.dict(os.environ, kept, clear=True):
        group.init_process_group("gloo")
        torch.manual_seed(0)
        yield
        dist.destroy_process_group()
    running._held.clear()
