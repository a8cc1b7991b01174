"""What nodes of Kubernetes offer (F95, F98, F104)."""

from __future__ import annotations

import pytest
from tests.unit.operator.objects import deleted, node

from holdfast.core.executions import GPUS_PER_NODE_MAX
from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.names import object_of
from holdfast_services.operator.domain.nodes import offer_of


def test_a_labelled_node_offers_its_gpus_and_their_type():
    labels = {"holdfast.dev/gpus": "auto", "nvidia.com/gpu.product": "NVIDIA H100 80GB HBM3"}
    offer = offer_of(node(gpus=8, labels=labels))

    assert (offer.gpus, offer.gpu_type, offer.asked, offer.ready) == (
        8, "NVIDIA-H100-80GB-HBM3", True, True,
    )  # fmt: skip
    assert not offer.leaving


def test_a_number_offers_fewer_or_places_on_the_cpu():
    assert offer_of(node(gpus=8, labels={"holdfast.dev/gpus": "2"})).gpus == 2
    assert offer_of(node(gpus=2, labels={"holdfast.dev/gpus": "8"})).gpus == 2, "no more than are"
    cpu = offer_of(node(gpus=0, labels={"holdfast.dev/gpus": "4"}))

    assert (cpu.gpus, cpu.gpu_type) == (4, "cpu")


def test_a_label_that_is_no_number_is_said():
    offer = offer_of(node(labels={"holdfast.dev/gpus": "all"}))

    assert "'all': write auto, or a number" in offer.leaving


def test_a_node_without_the_label_is_not_asked_and_jobs_leave_it():
    offer = offer_of(node(labels={}))

    assert not offer.asked
    assert "no label holdfast.dev/gpus" in offer.leaving


@pytest.mark.parametrize(
    "labels",
    [
        {"cloud.google.com/gke-spot": "true"},
        {"eks.amazonaws.com/capacityType": "SPOT"},
        {"karpenter.sh/capacity-type": "spot"},
        {"kubernetes.azure.com/scalesetpriority": "spot"},
        {"holdfast.dev/spot": "true"},
    ],
)
def test_spot_nodes_are_known_by_their_labels(labels):
    assert offer_of(node(labels={"holdfast.dev/gpus": "auto", **labels})).spot
    others = dict.fromkeys(labels, "on-demand")
    assert not offer_of(node(labels={"holdfast.dev/gpus": "auto", **others})).spot


def test_jobs_leave_a_node_that_is_cordoned_or_about_to_end():
    """F104: the notice of a cloud reaches the scheduler as an executor's does."""
    assert offer_of(node(unschedulable=True)).leaving == "it is cordoned"
    taints = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    assert "ToBeDeletedByClusterAutoscaler" in offer_of(node(taints=taints)).leaving
    assert not offer_of(node(taints=[{"key": "dedicated", "effect": "NoSchedule"}])).leaving


def test_a_node_whose_kubelet_is_silent_is_not_ready():
    assert not offer_of(node(ready=False)).ready
    bare = {"metadata": {"name": "a"}}
    assert not offer_of(bare).ready


def test_a_node_that_is_being_deleted_leaves():
    assert offer_of(deleted(node())).leaving == "it is being deleted"


def test_a_node_offers_no_more_gpus_than_the_scheduler_takes():
    """A report that it does not take would be a node that is lost."""
    assert offer_of(node(gpus=100)).gpus == GPUS_PER_NODE_MAX
    places = node(gpus=0, labels={"holdfast.dev/gpus": "9999"})
    assert offer_of(places).gpus == GPUS_PER_NODE_MAX


@pytest.mark.parametrize("job", ["elsewhere", "a.", "a/b.c", "a.b/c"])
def test_a_job_of_another_kind_has_no_object(job):
    """Nor is a part of its name taken for one of a path."""
    with pytest.raises(InvalidRequestError, match="is of no HoldfastJob"):
        object_of(job)
