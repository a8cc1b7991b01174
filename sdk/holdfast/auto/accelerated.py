"""Accelerate without a Trainer: its loaders read a batch ahead, and it counts micro-batches.

A pass is what the script is given, so one over Accelerate's loader, with the torch loader inside it
that is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from weakref import ref

from holdfast.auto.gathering import Gathering, Loader
from holdfast.auto.imports import await_modules
from holdfast.patches import Patches

_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")
Begin = Callable[[Loader], Iterator[Any] | None]


class Accelerated:
    """What scripts build with Accelerate; ``begin`` returns a pass, or None: it is not ours."""

    def __init__(self, gathering: Gathering, patches: Patches, begin: Begin) -> None:
        self._gathering = gathering
        self._patches = patches
        self._begin = begin
        self._around: dict[int, tuple[ref[Loader], ref[Any], Callable[[Any], Iterator[Any]]]] = {}
        await_modules(
            {
                "accelerate.data_loader": self._has_loaders,
                "accelerate.accelerator": self._has_accelerator,
            },
            patches,
        )

    def has(self, loader: Loader) -> bool:
        """Tell whether ``loader`` is inside one of Accelerate's."""
        inside, _, _ = self._around.get(id(loader), (None, None, None))
        return inside is not None and inside() is loader

    def iterate(self, loader: Loader) -> Iterator[Any] | None:
        """Return an iterator of the loader around ``loader``; None: there is none."""
        if not self.has(loader):
            return None
        _, around, original = self._around[id(loader)]
        return original(around())

    def _has_loaders(self, module: ModuleType) -> None:
        for name in _LOADERS:
            self._patches.replace(getattr(module, name), "__iter__", self._passing)

    def _passing(self, original: Any) -> Any:
        def begin(around: Any) -> Iterator[Any]:
            loader = around.base_dataloader
            self._around[id(loader)] = ref(loader), ref(around), original
            found = self._begin(loader)
            return original(around) if found is None else found

        return begin

    def _has_accelerator(self, module: ModuleType) -> None:
        self._patches.replace(module.Accelerator, "__init__", self._noting)

    def _noting(self, original: Any) -> Any:
        def begin(made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            made.holdfast_count = AcceleratorCount(made)
            self._gathering.note(made.holdfast_count)

        begin.__wrapped__ = original  # type: ignore[attr-defined]  # inspect shows its arguments
        return begin


class AcceleratorCount:
    """The micro-batches that an ``Accelerator`` has counted for its accumulation."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = ref(accelerator)

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        accelerator = self._accelerator()
        return {"step": accelerator.step if accelerator is not None else 0}

    def load_state_dict(self, tree: Mapping[str, int]) -> None:
        """Give the accelerator its count."""
        accelerator = self._accelerator()
        if accelerator is not None:
            accelerator.step = tree["step"]
