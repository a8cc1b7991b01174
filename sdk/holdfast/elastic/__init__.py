"""Training that adapts to the replicas it is given: batch size, learning rate, samples, metrics.

Public names are loaded on first use, as in ``holdfast`` itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.elastic.accumulator import Accumulator
    from holdfast.elastic.adaptation import Adaptation, adapt
    from holdfast.elastic.epochs import Epochs, remaining_epochs_until
    from holdfast.elastic.group import init_process_group
    from holdfast.elastic.loader import AdaptiveDataLoader
    from holdfast.elastic.mesh import device_mesh
    from holdfast.elastic.noise_scale import NoiseScale
    from holdfast.elastic.parallel import AdaptiveDataParallel
    from holdfast.elastic.scaling_rules import (
        AdamScale,
        AdaScale,
        LEGWScale,
        LinearScale,
        ScalingRule,
        SqrtScale,
    )
    from holdfast.state.samplers import ElasticSampler

__all__ = [
    "Accumulator",
    "AdaScale",
    "AdamScale",
    "Adaptation",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "ElasticSampler",
    "Epochs",
    "LEGWScale",
    "LinearScale",
    "NoiseScale",
    "ScalingRule",
    "SqrtScale",
    "adapt",
    "device_mesh",
    "init_process_group",
    "remaining_epochs_until",
]

_HOME = {
    "Accumulator": "elastic.accumulator",
    "Adaptation": "elastic.adaptation",
    "AdaptiveDataLoader": "elastic.loader",
    "AdaptiveDataParallel": "elastic.parallel",
    "ElasticSampler": "state.samplers",
    "Epochs": "elastic.epochs",
    "NoiseScale": "elastic.noise_scale",
    "adapt": "elastic.adaptation",
    "device_mesh": "elastic.mesh",
    "init_process_group": "elastic.group",
    "remaining_epochs_until": "elastic.epochs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.elastic' has no attribute {name!r}")
    home = importlib.import_module(f"holdfast.{_HOME.get(name, 'elastic.scaling_rules')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
