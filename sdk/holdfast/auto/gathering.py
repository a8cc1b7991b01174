"""What a script has built so far: modules, optimizers, schedulers, scalers and data loaders.

Each is noted when its constructor begins, so in the order in which the script builds them: names
are made of classes and that order, and are the same after a restart.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter, deque
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

from holdfast.patches import Patches
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
        self._ended = False
        for kind in (*KINDS, *_OWN_CONSTRUCTORS):
            patches.replace(kind, "__init__", self._noting)
        patches.replace(nn.Module, "__setstate__", self._noting)
        patches.then(self._end)

    def _noting(self, original: Any) -> Any:
        def begin(made: Any, *args: Any, **kwargs: Any) -> None:
            self.note(made)
            original(made, *args, **kwargs)

        begin.__wrapped__ = original  # type: ignore[attr-defined]  # inspect shows its arguments
        return begin

    def note(self, made: object) -> None:
        """Note what was built."""
        if self._ended:
            return
        number, found = self._count, self._found
        self._count += 1
        if isinstance(made, TrackedAttributes):
            self._kept.append(made)  # its script needs it for nothing
        found[number] = weakref.ref(made, lambda _: found.pop(number, None))

    def _end(self) -> None:
        self._ended = True
        self._found.clear()
        self._kept.clear()

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
        wanted = [value for value in wanted if not _is_compiled_from(value, modules)]
        return dict(_with_loose_tensors(_named(wanted)))

    def _values(self) -> list[Any]:
        alive = [reference() for _, reference in sorted(self._found.items())]
        return list({id(value): value for value in alive if value is not None}.values())


def attributes_of(values: Iterable[object]) -> dict[tuple[str, int], object]:
    """Return what modules hold in attributes that no ``state_dict`` has, to see what changes.

    By name of class and attribute and number of the module.
    """
    roots = [value for value in values if isinstance(value, nn.Module)]
    modules = {id(module): module for root in roots for module in root.modules()}
    return {
        (f"{type(module).__name__}.{name}", number): look_of(value)
        for number, module in enumerate(modules.values())
        if type(module).get_extra_state is nn.Module.get_extra_state
        if not isinstance(module, DistributedDataParallel | torch.jit.ScriptModule)
        if not type(module).__module__.startswith("torchmetrics.")
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def look_of(value: object) -> object:
    """Return what tells whether a value has changed; None where that is unknown."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version  # noqa: SLF001 - torch counts changes there
    if isinstance(value, list | dict | set | deque):
        return len(value)
    return value if isinstance(value, bool | int | float | str) else None


def _is_compiled_from(value: object, modules: Iterable[nn.Module]) -> bool:
    """Tell whether it is a TorchScript module all of whose tensors are those of others."""
    if not isinstance(value, torch.jit.ScriptModule):
        return False
    others = (module for module in modules if not isinstance(module, torch.jit.ScriptModule))
    known = {id(one) for other in others for one in _tensors(other)}
    return known.issuperset(map(id, _tensors(value)))


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _is_kept(value: object) -> bool:
    if not isinstance(value, nn.Module):
        return value is not None
    return any(True for _ in _tensors(value))


def _named(values: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Name each by its class; the second of a class ends in ``_2``."""
    count: Counter[str] = Counter()
    for value in values:
        name = type(unwrapped(value)).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}_{count[name]}", value


def _with_loose_tensors(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield also what optimizers train that is in no module, under the name of the optimizer."""
    all_named = list(named)
    modules = [value for _, value in all_named if isinstance(value, nn.Module)]
    seen = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, value in all_named:
        yield name, value
        if isinstance(value, Optimizer):
            trained = [one for group in value.param_groups for one in group["params"]]
            if loose := [one for one in trained if id(one) not in seen]:
                seen.update(map(id, loose))
                yield f"{name}_tensors", loose


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
    inner = vars(module).get("_modules")  # TorchScript's is no dict
    return inner.get("_orig_mod") if isinstance(inner, dict) else None


def kept_tensors(values: Iterable[object]) -> Iterator[object]:
    """Yield the tensors of modules, and those that an optimizer trains and no module has."""
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()
        elif isinstance(value, list):
            yield from value


def streams_of(loader: Loader) -> Iterator[object]:
    """Yield the random generators that ``loader`` draws with, None for each that it has not."""
    for part in (loader, loader.sampler, loader.batch_sampler):
        yield getattr(part, "generator", None)
