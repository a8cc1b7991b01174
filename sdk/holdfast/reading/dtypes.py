"""The dtypes of torch and their names in a segment."""

from __future__ import annotations

import torch

from holdfast.errors import InvalidRequestError

TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Every dtype of the format, by its safetensors name."""

_NAMES = {dtype: name for name, dtype in TORCH.items()}


def dtype_name(fqn: str, tensor: torch.Tensor) -> str:
    """Return the format's name of the tensor's dtype.

    Raises:
        InvalidRequestError: the format has no such dtype, or the tensor is sparse, quantized or
            without storage; the message names the tensor.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidRequestError(
            f"tensor {fqn!r} is {tensor.dtype}, which cannot be saved: put {_instead(tensor)} into "
            f"the state",
            key=fqn,
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidRequestError(
            f"tensor {fqn!r} is {tensor.layout} on {tensor.device}; only dense tensors with "
            f"storage can be saved"
        )
    check_memory(fqn, tensor)
    return name


def check_memory(fqn: str, tensor: torch.Tensor) -> None:
    """Do nothing if the elements of ``tensor`` are in memory: who read others would crash.

    Raises:
        InvalidRequestError: its storage was freed, as by ``untyped_storage().resize_(0)``.
    """
    if is_freed(tensor):
        raise InvalidRequestError(
            f"the memory of tensor {fqn!r} was freed (untyped_storage().resize_(0)): save and "
            f"restore while it has its values",
            key=fqn,
        )


def is_freed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has elements and its storage none."""
    return not tensor.untyped_storage().nbytes() and tensor.numel() > 0


def _instead(tensor: torch.Tensor) -> str:
    """Return what of a tensor of a dtype that the format lacks can be saved, bit for bit."""
    if tensor.is_complex():
        return "torch.view_as_real() of it"
    if tensor.is_quantized:
        return "its int_repr() with its scale and zero point"
    return "its bytes, view(torch.uint8),"
