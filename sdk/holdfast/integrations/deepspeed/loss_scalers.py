"""DeepSpeed's loss scalers as plain data and back: the only objects of its in a checkpoint.

The others that its files have (``ZeroStageEnum``, ``fragment_address``) are not stored: they follow
from the engine that loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from deepspeed.runtime.fp16 import loss_scaler

from holdfast.errors import InvalidRequestError, ManifestError

_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (loss_scaler.LossScaler, loss_scaler.DynamicLossScaler)
}
_DTYPE = "dtype"
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_PLAIN = (bool, int, float, str, type(None))


def to_plain(scaler: object) -> dict[str, object]:
    """Return a loss scaler as plain data.

    Raises:
        InvalidRequestError: it is not one of DeepSpeed's, or has an attribute that is not plain.
    """
    name = type(scaler).__name__
    if _CLASSES.get(name) is not type(scaler):
        raise InvalidRequestError(
            f"loss scaler {type(scaler).__module__}.{name} is not supported: use DeepSpeed's own"
        )
    fields = dict(vars(scaler))
    if _DTYPE in fields:
        fields[_DTYPE] = str(fields[_DTYPE])
    for field, value in fields.items():
        if type(value) not in _PLAIN:
            raise InvalidRequestError(f"loss scaler has a {type(value).__name__} as {field!r}")
    return {"class": name, "fields": fields}


def from_plain(plain: object) -> object:
    """Return the loss scaler that ``to_plain`` was given.

    Raises:
        ManifestError: it is none.
    """
    told = cast("Mapping[str, Any]", plain if isinstance(plain, dict) else {})
    kind, fields = _CLASSES.get(str(told.get("class"))), told.get("fields")
    if kind is None or not isinstance(fields, dict):
        raise ManifestError(f"no loss scaler of DeepSpeed: {str(plain)[:80]}")
    made: object = object.__new__(kind)
    for field, value in fields.items():
        if type(value) not in _PLAIN or (field == _DTYPE and value not in _DTYPES):
            raise ManifestError(f"a loss scaler has {str(value)[:40]!r} as {field[:40]!r}")
        vars(made)[field] = _DTYPES[value] if field == _DTYPE else value
    return made
