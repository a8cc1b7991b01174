"""What labels, annotations and objects are called."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

from holdfast.core.ids import job_name
from holdfast.errors import InvalidRequestError

Document: TypeAlias = Mapping[str, Any]
"""An object of Kubernetes, or an answer of the scheduler, as JSON has it."""

GROUP = "holdfast.dev"
VERSION = "v1alpha1"
PLURAL = "holdfastjobs"
KIND = "HoldfastJob"

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "holdfast-operator"
JOB = f"{GROUP}/job"
START = f"{GROUP}/start"
NODE = f"{GROUP}/node"
REFUSED = f"{GROUP}/refused"
"""Why a pod was ended that could not begin, an annotation."""
GPUS = f"{GROUP}/gpus"
"""Of a node: ``auto``, or how many of its GPUs are Holdfast's; without it none is."""
SPOT = f"{GROUP}/spot"
FINALIZER = f"{GROUP}/told"
"""Keeps a pod until the scheduler has heard of its end, and a HoldfastJob until it has none."""

NAME_LENGTH_MAX = 63
"""Of a HoldfastJob: it is the value of a label."""


def job_of(namespace: str, name: str) -> str:
    """Return what the scheduler calls a HoldfastJob; a namespace has no dots, so no two share it.

    Raises:
        InvalidRequestError: the name is empty, too long, or not to be used.
    """
    if not 1 <= len(name) <= NAME_LENGTH_MAX or "/" in name:
        raise InvalidRequestError(
            f"metadata.name {name[:NAME_LENGTH_MAX]!r} has {len(name)} characters: "
            f"it must have 1 to {NAME_LENGTH_MAX}, and no '/'"
        )
    return job_name(f"{namespace}.{name}")


def object_of(job: str) -> tuple[str, str]:
    """Return the namespace and the name of a job's HoldfastJob.

    Raises:
        InvalidRequestError: it can have none: it was submitted elsewhere.
    """
    namespace, _, name = job.partition(".")
    if not namespace or not name or "/" in job:
        raise InvalidRequestError(f"job {job} is of no HoldfastJob: none has such a name")
    return namespace, name


def pod_name(job: str, start: int, node: str) -> str:
    """Return the name that the pod of a start has on a node: the same whenever it is made."""
    _, name = object_of(job)
    return f"{name}-{start}-{hashlib.blake2b(node.encode(), digest_size=4).hexdigest()}"
