"""The device mesh of a round: which axes there are, and how long each is with the ranks there are.

A rescale gives a job another number of ranks, and with it another mesh of those that it has named.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.core import meshes as of_job
from holdfast.errors import InvalidRequestError


def device_mesh(device_type: str | None = None, *, meshes: Sequence[str] = ()) -> DeviceMesh:
    """Return the mesh of all ranks for as many as there are now; collective.

    Every axis is there, also one of length 1, so that ``mesh["tp"]`` always is.

    Args:
        device_type: None takes ``cuda`` where there are GPUs, else ``cpu``.
        meshes: What to choose from where the launch names none; see ``holdfast run --mesh``.

    Raises:
        InvalidRequestError: nobody has named meshes, or none is for so many ranks.
    """
    if not dist.is_initialized():
        raise InvalidRequestError("join the process group before: elastic.init_process_group()")
    ranks = dist.get_world_size()
    told = os.environ.get(of_job.MESH, "")
    named = [told] if told else of_job.of_environment(os.environ) or list(meshes)
    if not named:
        raise InvalidRequestError(
            "no mesh is named: start with holdfast run --mesh dp=*,tp=2, or pass meshes="
        )
    of_job.check(named)
    mesh = of_job.required(named, ranks)
    assert math.prod(mesh.values()) == ranks
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
