"""Memory for tensors that are on the meta device: made by the restore that fills it, only once.

A tensor gets its memory when all of the checkpoint has been read, and stays the object that it is:
an optimizer that was made of it has it still. Until then nothing has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.state.local_boxes import is_sharded, local

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""What of a tensor is called in the backward pass; it stays with memory, not with the object."""


def is_blank(tensor: torch.Tensor) -> bool:
    """Tell whether what of ``tensor`` lies here has no memory."""
    return local(tensor).is_meta


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return where ``tensor`` lies; if it has no memory, where it gets it.

    That is the device of its mesh, and for a plain tensor torch's default device.
    """
    if not is_blank(tensor):
        return tensor.device
    if is_sharded(tensor):
        kind: str = tensor.device_mesh.device_type  # type: ignore[attr-defined]
        # A mesh has a type of device; which of them is this rank's, the script has set.
        return torch.empty(0, device=kind).device
    return torch.get_default_device()


def new_memory(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for what of ``tensor`` lies here, with nothing in it; ``put`` gives it to it.

    Raises:
        InvalidRequestError: the default device is the meta device, or ``tensor`` is of a kind that
            cannot be given memory; the message names it.
    """
    device = device_of(tensor)
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if device.type == "meta" or weakref.getweakrefs(tensor) or not (plain or is_sharded(tensor)):
        raise InvalidRequestError(
            f"tensor {fqn!r} is on the meta device and cannot be given memory by the restore "
            f"(default device {device}, class {type(tensor).__name__}): call "
            f"to_empty(device=...) on its module before the restore",
            key=fqn,
        )
    return torch.empty_like(local(tensor), device=device, requires_grad=False)


def put(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give ``tensor`` its memory, which ``new_memory`` returned for it."""
    filled: Any = _of_mesh(tensor, memory) if is_sharded(tensor) else memory
    if isinstance(tensor, nn.Parameter):
        filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
    else:
        filled.requires_grad_(tensor.requires_grad)
    filled.__dict__.update(tensor.__dict__)
    hooks = {name: getattr(tensor, name) for name in _HOOKS if getattr(tensor, name)}
    if not is_sharded(tensor):
        filled.__class__ = tensor.__class__
    torch.utils.swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]
    for name, called in hooks.items():
        setattr(tensor, name, called)


def _of_mesh(tensor: Any, memory: torch.Tensor) -> torch.Tensor:
    # Not at the top: it takes a second, and whoever has a DTensor has imported it.
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(
        memory, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def check_buffers(path: str, root: nn.Module) -> None:
    """Refuse a module of which no checkpoint has all: a buffer without memory is not persistent.

    Raises:
        InvalidRequestError: names it.
    """
    for name in _never_saved(root):
        raise InvalidRequestError(
            f"buffer '{path}.{name}' is on the meta device and is not persistent, so that no "
            f"checkpoint has it: compute it on a real device before the restore",
            key=f"{path}.{name}",
        )


def _never_saved(root: nn.Module) -> Iterator[str]:
    for prefix, module in root.named_modules():
        for name in module._non_persistent_buffers_set:  # noqa: SLF001
            buffer = module._buffers.get(name)  # noqa: SLF001
            if buffer is not None and is_blank(buffer):
                yield f"{prefix}.{name}".lstrip(".")


def check_own_saving(path: str, module: nn.Module) -> None:
    """Refuse a module that loads itself into tensors without memory: torch passes these over.

    Raises:
        InvalidRequestError: names the first of them.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_blank(tensor):
            raise InvalidRequestError(
                f"tensor '{path}.{name}' is on the meta device and its module loads itself in its "
                f"own way: call to_empty(device=...) on it before the restore",
                key=f"{path}.{name}",
            )
