"""Holdfast keeps a training run alive: snapshot, replicate, restore bit for bit.

Public names are loaded on first use, so that ``import holdfast`` costs milliseconds and imports
neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.checkpointer import Checkpointer, Decided, Restored, SaveHandle
    from holdfast.guards import RefuseNonFinite
    from holdfast.oneshot import Loaded, load, save
    from holdfast.policy import (
        AnyOf,
        AtExit,
        Auto,
        EverySeconds,
        EverySteps,
        Never,
        OnPreemption,
        Parity,
        Replicas,
        Retention,
    )
    from holdfast.state import State
    from holdfast.state.dataloaders import ResumableLoader
    from holdfast.state.frozen import frozen
    from holdfast.state.iterables import ElasticIterable
    from holdfast.state.kinds import register_handler
    from holdfast.state.samplers import ElasticSampler
    from holdfast.state.sections import Section
    from holdfast.state.tracked import track

__version__ = "0.1.0"

__all__ = [
    "AnyOf",
    "AtExit",
    "Auto",
    "Checkpointer",
    "Decided",
    "ElasticIterable",
    "ElasticSampler",
    "EverySeconds",
    "EverySteps",
    "Loaded",
    "Never",
    "OnPreemption",
    "Parity",
    "RefuseNonFinite",
    "Replicas",
    "Restored",
    "ResumableLoader",
    "Retention",
    "SaveHandle",
    "Section",
    "State",
    "frozen",
    "load",
    "register_handler",
    "save",
    "track",
]

_HOME = {
    "Checkpointer": "holdfast.checkpointer",
    "Decided": "holdfast.checkpointer",
    "Restored": "holdfast.checkpointer",
    "SaveHandle": "holdfast.checkpointer",
    "ElasticIterable": "holdfast.state.iterables",
    "ElasticSampler": "holdfast.state.samplers",
    "RefuseNonFinite": "holdfast.guards",
    "ResumableLoader": "holdfast.state.dataloaders",
    "Section": "holdfast.state.sections",
    "State": "holdfast.state",
    "Loaded": "holdfast.oneshot",
    "load": "holdfast.oneshot",
    "save": "holdfast.oneshot",
    "frozen": "holdfast.state.frozen",
    "register_handler": "holdfast.state.kinds",
    "track": "holdfast.state.tracked",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from holdfast.garbage import no_collection  # noqa: PLC0415 - importing holdfast imports nothing

    # Beside torch's objects one search for garbage may take 80 ms.
    with no_collection():
        return getattr(importlib.import_module(_HOME.get(name, "holdfast.policy")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
