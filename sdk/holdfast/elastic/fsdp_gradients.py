"""Squared norms of FSDP2's gradients: of this rank's before they are scattered, of shards after.

Each FSDP module has one buffer that it reduces; a communication of ours, which is torch's, looks at
it before, a hook after the sum over replicas at what this rank has of the mean. Groups of
parameters lie in it mingled, so all of them have one noise scale together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from holdfast.elastic.gradient_layout import VIEW_ELEMENTS_MAX
from holdfast.elastic.measured import Measured, multiply
from holdfast.elastic.running import Running
from holdfast.errors import InvalidRequestError

_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By its newer name, if torch has it."""
_NEEDED = ("set_custom_reduce_scatter", "set_all_reduce_hook", "set_requires_gradient_sync")
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float64)


class FsdpGradients:
    """The norms of a model that ``fully_shard`` has sharded, over the ranks of its mesh.

    Raises:
        InvalidRequestError: it is not sharded, or more than data-parallel, or this torch does not
            let anybody look.
    """

    groups_count = 1

    def __init__(self, module: nn.Module) -> None:
        self._module, mesh = _root(module)
        self._ranks: int = mesh.size()
        self._copies = mesh.size(0) if mesh.ndim > 1 else 1
        self._group = _group_of(mesh)
        self._of: Running | None = None
        self._local: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []
        self._waited_s = 0.0
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(cast("Any", _Scatter(self)))
                part.set_all_reduce_hook(self._after)

    @property
    def replicas(self) -> int:
        """How many ranks average their gradients."""
        return self._ranks

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks to sum norms over; None: this one is alone."""
        return self._group if self._ranks > 1 else None

    def begin(self, now: Running | None) -> None:
        """Begin with a micro-batch: gradients are reduced with the last one alone."""
        self._of = now
        self._local.clear()
        self._total.clear()
        self._waited_s = 0.0
        if now is not None:
            self._module.set_requires_gradient_sync(now.micro.last)

    @property
    def reduced(self) -> bool:
        """Whether the gradients of a whole update were averaged since the last ``take``."""
        return bool(self._total)

    @property
    def sync_s(self) -> float:
        """How long the last backward has waited for other ranks: on a CPU, elsewhere not known."""
        return self._waited_s

    def take(self) -> Measured | None:
        """Return the norms of the update whose gradients were averaged last; None: not measured."""
        local, total = self._local, self._total
        self._local, self._total = [], []
        now = self._of
        if not (local and total) or (now is not None and not now.whole) or self._ranks == 1:
            return None
        count = now.batching.gradients_count if now else float(self._ranks)
        portion = now.portion if now else 1.0
        # Each rank has its own gradient, and a shard of the mean as often as there are copies.
        return Measured(
            local=torch.stack(local).sum().reshape(1) / (self._ranks * portion**2),
            total=torch.stack(total).sum().reshape(1) / self._copies,
            count=count,
            scale=now.scale if now else 1.0,
        )

    def state_dict(self) -> dict[str, object]:
        """Return nothing: an update is compared with none before it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def before(self, mine: torch.Tensor) -> None:
        """Look at what this rank brings to a mean, as the mean over samples wants it."""
        if self._of is not None:
            multiply(mine, self._of.factor_of_plain_sum)
        if mine.dtype in _SUPPORTED:
            self._local.append(_sqr(mine))

    def _after(self, shard: torch.Tensor) -> None:
        if shard.dtype in _SUPPORTED:
            self._total.append(_sqr(shard))

    def waited(self, seconds: float) -> None:
        """Note how long a sum over ranks took that this thread waited for."""
        self._waited_s += seconds


class _Scatter:
    """What FSDP2 calls to allocate a buffer, and to reduce one."""

    def __init__(self, gradients: FsdpGradients) -> None:
        self._gradients = gradients

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce and scatter, after a look."""
        self._gradients.before(input_tensor)
        began_s = time.perf_counter()
        work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if not input_tensor.is_cuda:
            self._gradients.waited(time.perf_counter() - began_s)
        return work


def _root(module: nn.Module) -> tuple[Any, Any]:
    """Return a sharded module, and the mesh of its parameters."""
    missing = [name for name in _NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise InvalidRequestError(
            f"the gradients of FSDP2 cannot be measured with torch {torch.__version__}: it has no "
            f"{missing[0]}; use a newer one"
        )
    if not isinstance(module, FSDPModule):
        raise InvalidRequestError(
            f"{type(module).__name__} is not sharded: call fully_shard(model) before adapt(), or "
            f"use AdaptiveDataParallel(model, optimizer)"
        )
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    if len(meshes) != 1:
        raise InvalidRequestError(
            f"the parameters of {type(module).__name__} lie on {len(meshes)} meshes: shard all of "
            f"them over one, with data parallelism alone"
        )
    mesh = meshes.pop()
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or mesh.size() != dist.get_world_size() or "tp" in names:
        raise InvalidRequestError(
            f"a mesh of {tuple(mesh.shape)} {names} is not data parallelism over all "
            f"{dist.get_world_size()} ranks: gradients of tensor and pipeline parallelism are not "
            f"measured yet"
        )
    return module, mesh


def _group_of(mesh: Any) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def _sqr(flat: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of a buffer in double precision."""
    dtype = torch.float32 if flat.dtype == torch.bfloat16 else None
    views = list(torch.split(flat.detach().view(-1), VIEW_ELEMENTS_MAX))
    return torch.stack(torch._foreach_norm(views, 2, dtype)).double().square().sum()  # noqa: SLF001
