"""Training that adapts to the replicas it is given: batch size, learning rate, samples, metrics.

Public names are loaded on first use, as in ``holdfast`` itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.elastic.accumulator import Accumulator
    from holdfast.elastic.epochs import Epochs, remaining_epochs_until
    from holdfast.elastic.noise_scale import NoiseScale
    from holdfast.elastic.scaling_rules import (
        AdamScale,
        AdaScale,
        LEGWScale,
        LinearScale,
        ScalingRule,
        SqrtScale,
    )

__all__ = [
    "Accumulator",
    "AdaScale",
    "AdamScale",
    "Epochs",
    "LEGWScale",
    "LinearScale",
    "NoiseScale",
    "ScalingRule",
    "SqrtScale",
    "remaining_epochs_until",
]

_HOME = {
    "Accumulator": "accumulator",
    "Epochs": "epochs",
    "NoiseScale": "noise_scale",
    "remaining_epochs_until": "epochs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.elastic' has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOME.get(name, 'scaling_rules')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
