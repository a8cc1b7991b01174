"""The ranks that train together: how they find each other, and agree on a few numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import InvalidRequestError
from holdfast.training import launch

TIMEOUT_S = 600.0
"""Of a collective, and of the wait for the other ranks."""


def init_process_group(backend: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
    """Join the process group of this launch, or be one of a single rank.

    Under ``holdfast run``, torchrun or a scheduler the environment says who takes part; without it
    this process is alone, and needs no port. A group that is there already is left as it is. On
    GPUs this process takes the one of its local rank.

    Args:
        backend: None takes ``nccl`` where there are GPUs, else ``gloo``.
        timeout_s: How long a collective may take, and the others to come.

    Raises:
        InvalidRequestError: the environment names ranks, but not where they meet; or it
            contradicts itself.
    """
    if dist.is_initialized():
        return
    place = launch.place(os.environ)
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available() and backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    if place.world_size == 1:
        alone: Any = dist
        store = alone.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InvalidRequestError(
            f"there are {place.world_size} ranks, and {' and '.join(missing)} say nowhere to meet: "
            f"start them with holdfast run or torchrun"
        )
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout)


def nodes_count() -> int:
    """Return on how many nodes the ranks of this launch are."""
    told = os.environ.get("GROUP_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else launch.place(os.environ).nodes_count


def replicas_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return how many ranks share the data, and which of them this one is."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group)


def agreed(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Return the numbers of the group's first rank; collective."""
    replicas, _ = replicas_of(group)
    if replicas == 1:
        return list(numbers)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    shared = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(shared, src=first, group=group)
    return [int(number) for number in shared.tolist()]
