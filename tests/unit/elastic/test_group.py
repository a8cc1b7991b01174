"""How the ranks of a launch find each other (F2)."""

import pytest
import torch.distributed as dist

from holdfast.elastic import group
from holdfast.errors import InvalidRequestError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture
def environ(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


def test_a_process_without_a_launcher_is_alone_and_a_group_that_is_there_is_left(environ):
    assert group.replicas_of(None) == (1, 0)
    group.init_process_group("gloo")
    try:
        held = dist.group.WORLD
        group.init_process_group()

        assert dist.group.WORLD is held
        assert group.replicas_of(None) == (1, 0)
        assert group.agreed([3, 4], None) == [3, 4]
    finally:
        dist.destroy_process_group()


def test_ranks_that_meet_nowhere_are_told_so(environ):
    environ(RANK="0", WORLD_SIZE="2", MASTER_PORT="1234")
    with pytest.raises(InvalidRequestError, match="2 ranks, and MASTER_ADDR say nowhere"):
        group.init_process_group("gloo")
    environ(RANK="2", MASTER_ADDR="127.0.0.1")
    with pytest.raises(InvalidRequestError, match="contradict"):
        group.init_process_group("gloo")


def test_nodes_are_those_the_launcher_counts_else_as_many_as_ranks_fill(environ):
    assert group.nodes_count() == 1
    environ(RANK="0", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert group.nodes_count() == 2
    environ(GROUP_WORLD_SIZE="3")
    assert group.nodes_count() == 3
