"""Objects of Kubernetes as tests need them."""

from __future__ import annotations

from pathlib import Path

import yaml

from holdfast.core.executions import Order
from holdfast_services.operator.domain.names import FINALIZER
from holdfast_services.operator.domain.pods import pod_of

MANIFESTS = Path(__file__).parents[3] / "deploy/kubernetes"


def manifests(name):
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


def example(**spec):
    (job,) = manifests("example")
    job["metadata"] |= {"uid": "u-1", "generation": 1, "finalizers": [FINALIZER]}
    job["spec"] |= spec
    return job


def order(start=7, **what):
    given = {"gpus": 2, "nodes_max": 4, "command": ("train.py",), **what}
    return Order(**{"job": "default.gpt", "start": start, **given})


def node(name="a", *, ready=True, **what):
    """Return a node with two GPUs; ``labels``, ``taints``, ``unschedulable`` as Kubernetes has."""
    labels = what.pop("labels", {"holdfast.dev/gpus": "auto"})
    gpus = what.pop("gpus", 2)
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": what,
        "status": {
            "allocatable": {"cpu": "16", "nvidia.com/gpu": str(gpus)} if gpus else {},
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def pod(start=7, on="a", *, phase="Running", terminated=None, waiting=None, **status):
    """Return the pod of a start, as its kubelet would have it."""
    made = pod_of(order(start), on, example())
    state = {"terminated": terminated} if terminated else {"waiting": waiting} if waiting else {}
    made["spec"]["nodeName"] = on
    containers = [{"name": "ranks", "state": state or {"running": {}}}]
    made["status"] = {"phase": phase, "containerStatuses": containers, **status}
    return made


def deleted(one):
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return one
