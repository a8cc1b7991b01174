"""What a script has built so far: modules, optimizers, schedulers, scalers and data loaders.

Each is noted when its constructor begins, so in the order in which the script builds them: names
are made of classes and that order, and are the same after a restart.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader

from holdfast.auto.patches import Patches
from holdfast.state.tracked import Tracked, TrackedAttributes

Loader = DataLoader[Any]
KINDS: tuple[type, ...] = (
    *(nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader),
    *(Tracked, TrackedAttributes),
)
# These do not call the constructor of their base.
_OWN_CONSTRUCTORS = (ReduceLROnPlateau, SequentialLR, ChainedScheduler)


class Gathering:
    """Everything of ``KINDS`` that was built since, and is still there.

    Holds nothing alive but tracked attributes. A copy of a module (``copy.deepcopy``) is another
    module.
    """

    def __init__(self, patches: Patches) -> None:
        self._count = 0
        self._found: dict[int, weakref.ref[Any]] = {}
        self._kept: list[TrackedAttributes] = []
        for kind in (*KINDS, *_OWN_CONSTRUCTORS):
            patches.replace(kind, "__init__", self._noting)
        patches.replace(nn.Module, "__setstate__", self._noting)

    def _noting(self, original: Any) -> Any:
        def begin(made: Any, *args: Any, **kwargs: Any) -> None:
            self._note(made)
            original(made, *args, **kwargs)

        begin.__wrapped__ = original  # type: ignore[attr-defined]  # inspect shows its arguments
        return begin

    def _note(self, made: object) -> None:
        number, found = self._count, self._found
        self._count += 1
        if isinstance(made, TrackedAttributes):
            self._kept.append(made)  # its script needs it for nothing
        found[number] = weakref.ref(made, lambda _: found.pop(number, None))

    @property
    def count(self) -> int:
        """How many have been noted; grows."""
        return self._count

    def made_since(self, count: int) -> list[Any]:
        """Return what was built after ``count`` were noted, is there, and has something to save."""
        late = [reference() for number, reference in self._found.items() if number >= count]
        return [value for value in late if not isinstance(value, DataLoader) and _is_kept(value)]

    def optimizers(self) -> list[Optimizer]:
        """Return all optimizers, in the order in which they were built."""
        return [value for value in self._values() if isinstance(value, Optimizer)]

    def loaders(self) -> list[Loader]:
        """Return all data loaders, in the order in which they were built."""
        return [value for value in self._values() if isinstance(value, DataLoader)]

    def state(self) -> dict[str, object]:
        """Return by name what a checkpoint holds, but for data loaders.

        Of modules those that no other one holds, if they have parameters or buffers: the wrappers.
        """
        gc.collect()  # modules that were replaced, as SyncBatchNorm's conversion does
        values = [value for value in self._values() if not isinstance(value, DataLoader)]
        modules = [value for value in values if isinstance(value, nn.Module)]
        inner = {id(child) for module in modules for child in module.children()}
        wanted = [value for value in values if id(value) not in inner and _is_kept(value)]
        return dict(_named(wanted))

    def _values(self) -> list[Any]:
        alive = [reference() for _, reference in sorted(self._found.items())]
        return list({id(value): value for value in alive if value is not None}.values())


def _is_kept(value: object) -> bool:
    if not isinstance(value, nn.Module):
        return value is not None
    return any(True for _ in itertools.chain(value.parameters(), value.buffers()))


def _named(values: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Name each by its class; the second of a class ends in ``_2``."""
    count: Counter[str] = Counter()
    for value in values:
        name = type(unwrapped(value)).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}_{count[name]}", value


def unwrapped(value: object) -> object:
    """Return the module inside DDP, ``torch.compile`` and the like."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(value, nn.Module) and isinstance(inner := _compiled(value), nn.Module):
            value = inner
        else:
            return value


def _compiled(module: nn.Module) -> object:
    return vars(module).get("_modules", {}).get("_orig_mod")
