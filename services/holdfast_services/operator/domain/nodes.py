"""What a node of Kubernetes offers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.executions import GPUS_PER_NODE_MAX
from holdfast_services.operator.domain.names import GPUS, SPOT, Document

RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
TYPES = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
SPOTS = {
    SPOT: "true",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "eks.amazonaws.com/capacitytype": "spot",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of nodes that can be taken away, in lower case."""
ENDINGS = (
    "ToBeDeletedByClusterAutoscaler",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
    "karpenter.sh/disrupted",
    "node.kubernetes.io/out-of-service",
)
"""Taints of nodes that are about to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What an executor of the node would say of it; ``asked``: it has the label.

    ``ready``: its kubelet is heard of. Without that nobody speaks for it.
    """

    node: str
    ready: bool
    asked: bool
    gpus: int = 0
    gpu_type: str = ""
    spot: bool = False
    leaving: str = ""


def offer_of(node: Document) -> Offer:
    """Return what a node offers."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    labels = metadata.get("labels") or {}
    here = _gpus(status)
    asked = labels.get(GPUS)
    count, leaving = here, ""
    if asked is None:
        leaving = f"it has no label {GPUS} any more"
    elif re.fullmatch("[0-9]{1,4}", asked):
        count = min(int(asked), here) if here else int(asked)
    elif asked != "auto":
        leaving = f"its label {GPUS} is {asked!r}: write auto, or a number"
    return Offer(
        node=metadata["name"],
        ready=_ready(status),
        asked=asked is not None,
        gpus=min(count, GPUS_PER_NODE_MAX),
        gpu_type=_type(labels, here),
        spot=any(labels.get(name, "").lower() == value for name, value in _spots(labels).items()),
        leaving=leaving or _leaving(metadata, spec),
    )


def _gpus(status: Document) -> int:
    allocatable = status.get("allocatable") or {}
    counts = (str(allocatable.get(name, "0")) for name in RESOURCES)
    return sum(int(count) for count in counts if count.isdecimal())


def _ready(status: Document) -> bool:
    conditions = status.get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _type(labels: Document, here: int) -> str:
    if not here:
        return "cpu"
    found = next((labels[name] for name in TYPES if name in labels), "")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", found)


def _spots(labels: Document) -> dict[str, str]:
    return {name: SPOTS[name.lower()] for name in labels if name.lower() in SPOTS}


def _leaving(metadata: Document, spec: Document) -> str:
    if metadata.get("deletionTimestamp"):
        return "it is being deleted"
    taints = {taint["key"] for taint in spec.get("taints") or ()}
    if found := [key for key in ENDINGS if key in taints]:
        return f"its taint {found[0]} says so"
    return "it is cordoned" if spec.get("unschedulable") else ""
