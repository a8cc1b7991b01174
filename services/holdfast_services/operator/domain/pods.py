"""The pod of an order: a launcher on one node, with a HoldfastJob's template around it."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.executions import Order
from holdfast_services.operator.domain.names import (
    FINALIZER,
    GROUP,
    JOB,
    KIND,
    MANAGED_BY,
    MANAGER,
    NODE,
    START,
    VERSION,
    Document,
    object_of,
    pod_name,
)
from holdfast_services.operator.domain.templates import template_of

AGENT_FOLDER = "/run/holdfast"
"""Where the agent's socket and memory are in its pod and in ours, which share them."""
NODE_FOLDER = "/dev/shm/holdfast"  # noqa: S108 - the agent's, of which its manifest makes sure
"""Where they are on the node."""
LAST_WORD = "/dev/termination-log"
KILL_AFTER_S = 10
"""Beyond its grace: a launcher that was told to end kills its ranks after that, and says so."""
_VOLUME = "holdfast-agent"


def pod_of(order: Order, node: str, job: Document) -> dict[str, Any]:
    """Return the pod that carries an order out on a node.

    Ranks run in the first container of the template. It sees all GPUs of the node: each round says
    which of them are the job's, and a pod cannot be given more or fewer while it lives.

    Raises:
        InvalidRequestError: the template is none, see ``template_of``.
    """
    namespace, name = object_of(order.job)
    template = template_of(job)
    metadata, spec = template["metadata"], template["spec"]
    spec["containers"][0] = _ranks(order, spec["containers"][0])
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = math.ceil(order.grace_s) + KILL_AFTER_S
    spec.setdefault("hostNetwork", True)
    spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    spec.setdefault("shareProcessNamespace", True)
    spec["affinity"]["nodeAffinity"] = _only(node)
    # Who has labelled a node has given it to Holdfast: its taints keep others away.
    everything = {"operator": "Exists", "effect": "NoSchedule"}
    spec["tolerations"].append(everything)
    folder = {"path": NODE_FOLDER, "type": "Directory"}
    spec["volumes"].append({"name": _VOLUME, "hostPath": folder})
    labels = {MANAGED_BY: MANAGER, JOB: name, START: str(order.start)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(order.job, order.start, node),
            "namespace": namespace,
            "labels": {**metadata["labels"], **labels},
            "annotations": {**metadata["annotations"], NODE: node},
            "finalizers": [FINALIZER],
            "ownerReferences": [_owner(job)],
        },
        "spec": spec,
    }


def _ranks(order: Order, container: Document) -> dict[str, Any]:
    ours = {
        "HOLDFAST_AGENT": f"{AGENT_FOLDER}/agent.sock",
        "NVIDIA_VISIBLE_DEVICES": "all",
        **order.environment,
    }
    kept = [one for one in container["env"] if one["name"] not in order.environment]
    named = {one["name"] for one in kept}
    variables = [{"name": n, "value": escaped(v)} for n, v in ours.items() if n not in named]
    mount = {"name": _VOLUME, "mountPath": AGENT_FOLDER}
    made: dict[str, Any] = {
        **container,
        "command": [escaped(word) for word in command(order)],
        "env": [*kept, *variables],
        "volumeMounts": [*container["volumeMounts"], mount],
        "terminationMessagePath": LAST_WORD,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    made.pop("args", None)
    if order.folder:
        made["workingDir"] = order.folder
    return made


def command(order: Order) -> list[str]:
    """Return the launcher of an order."""
    return [
        *("holdfast", "run", "--ending", LAST_WORD),
        *("--allocated", "--job", order.job, "--nnodes", f"1:{order.nodes_max}"),
        *("--nproc-per-node", str(order.gpus), "--grace", f"{order.grace_s:g}"),
        *order.command,
    ]


def escaped(word: str) -> str:
    """Return a word that Kubernetes, which replaces ``$(NAME)``, leaves as it was."""
    return word.replace("$", "$$")


def _only(node: str) -> dict[str, Any]:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [{"matchFields": [field]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _owner(job: Document) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"].get("uid", ""),
        "controller": True,
    }
