"""What is reserved of a Ray cluster, and what an executor inherits from a Ray worker."""

import sys

import pytest

from holdfast.errors import InvalidRequestError
from holdfast.executor.ray_cluster import RayCluster, RayOptions
from holdfast.executor.ray_node import inherited
from holdfast.executor.ray_shape import bundles, described

HEAD = {"CPU": 4.0, "memory": 1e9}
NODE = {"CPU": 64.0, "GPU": 8.0}
SMALL = {"CPU": 16.0, "GPU": 4.0}


def test_all_gpus_of_all_nodes_unless_less_is_asked_for():
    assert bundles([HEAD, SMALL, NODE], None, None) == [{"GPU": 8}, {"GPU": 4}]
    assert bundles([HEAD, SMALL, NODE], None, 1) == [{"GPU": 8}]
    assert bundles([HEAD, SMALL, NODE], 8, None) == [{"GPU": 8}]
    assert bundles([HEAD, SMALL, NODE], 4, None) == [{"GPU": 4}, {"GPU": 4}]


def test_nodes_that_are_not_there_yet_may_be_waited_for():
    assert bundles([HEAD, NODE], 8, 3) == [{"GPU": 8}] * 3


def test_without_gpus_anywhere_cpus_are_places():
    assert bundles([HEAD, HEAD], 2, None) == [{"CPU": 2}, {"CPU": 2}]


@pytest.mark.parametrize(
    ("nodes", "gpus", "count", "why"),
    [
        ([HEAD], None, None, "no node of the Ray cluster has GPUs"),
        ([HEAD, SMALL], 8, None, "none of the 2 nodes"),
        ([HEAD, SMALL], None, 2, "nodes 1 have GPUs"),
        ([], 1, None, "none of the 0 nodes"),
    ],
)
def test_what_no_number_follows_from_is_refused(nodes, gpus, count, why):
    with pytest.raises(InvalidRequestError, match=why):
        bundles(nodes, gpus, count)


def test_a_shape_is_told_in_words():
    assert described([{"GPU": 8}, {"GPU": 8}, {"GPU": 1}]) == "2 nodes with 8 GPUs, 1 with 1 GPU"
    assert described([{"CPU": 2}]) == "1 node with 2 CPUs"


def test_what_ray_has_set_for_its_worker_is_not_inherited():
    """A script would take `RAY_JOB_ID` for its own, and one thread for enough."""
    found = inherited({"RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3"})

    assert found == {"CUDA_VISIBLE_DEVICES": "3"}


def test_without_ray_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    options = RayOptions(address="auto", gpus=None, nodes=None, words=(), environ={})
    with pytest.raises(InvalidRequestError, match=r"pip install \"holdfast\[ray\]\""):
        RayCluster(options)
