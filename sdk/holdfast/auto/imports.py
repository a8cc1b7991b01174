"""Modules that a script will import, perhaps: what is to be done once one of them is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.patches import Patches

Then = Callable[[ModuleType], None]


def await_modules(wanted: Mapping[str, Then], patches: Patches) -> None:
    """Call ``wanted[name]`` with each of these modules when it is imported, or now if it was."""
    waiting: dict[str, Then] = {}
    for name, then in wanted.items():
        if name in sys.modules:
            then(sys.modules[name])
        else:
            waiting[name] = then
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    patches.then(finder.leave)


class _Finder:
    """Finds nothing itself: has the loader that another one finds call back."""

    def __init__(self, waiting: dict[str, Then]) -> None:
        self._waiting = waiting

    def leave(self) -> None:
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        then = self._waiting.pop(name, None)
        if then is None:
            return None
        others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        for finder in others:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _call_back(spec, then)
                return spec
        return None


def _call_back(spec: ModuleSpec, then: Then) -> None:
    loader: Any = spec.loader
    if not hasattr(loader, "exec_module"):
        return
    run = loader.exec_module

    def run_and_call(module: ModuleType) -> None:
        del loader.exec_module  # it was an attribute of this loader only
        run(module)
        then(module)

    loader.exec_module = run_and_call
