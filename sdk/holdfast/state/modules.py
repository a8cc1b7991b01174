"""Modules: the names of their tensors, and which ranks hold the same.

Names are those of ``state_dict()`` without the wrappers' parts. Tensors are taken from the
modules' own tables, not from ``state_dict()``: a table can be compared by identity, and a
detached alias cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidRequestError
from holdfast.format.blob import SavedModule
from holdfast.state.survey import Home, Survey

_INNER = {
    "DistributedDataParallel": "module", "DataParallel": "module", "AveragedModel": "module",
    "OptimizedModule": "_orig_mod", "ActivationWrapper": "_checkpoint_wrapped_module",
}  # fmt: skip
"""Of each class that wraps a module: where it keeps it. Names do not show the wrapper."""
_REFUSED_MODULES = frozenset({"FullyShardedDataParallel"})
_SHARDED_MODULE = "FSDPModule"


def parts(
    path: str, root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of ``root``, called ``path``, and of all that is in it.

    A wrapper's inner module has the wrapper's name. Only wrappers are left out: an attribute of
    the user's own class keeps its name, also when it is called ``module``.

    >>> [name for name, _ in parts("m", nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['m', 'm', 'm.0']
    """
    found: dict[str, tuple[str, str]] = {}  # by torch's prefix: our name, and the inner's
    for prefix, module in root.named_modules(remove_duplicate=remove_duplicate):
        parent, _, child = prefix.rpartition(".")
        above, inner = found[parent] if prefix else (path, child)
        name = above if child == inner else f"{above}.{child}"
        found[prefix] = name, _inner(module)
        yield name, module


def _inner(module: nn.Module) -> str:
    classes = (cls.__name__ for cls in type(module).__mro__)
    return next((_INNER[name] for name in classes if name in _INNER), "")


def has_own_saving(module: nn.Module) -> bool:
    """Tell whether the module saves itself in its own way, so that ``state_dict()`` is called."""
    return type(module).state_dict is not nn.Module.state_dict or any(
        type(part)._save_to_state_dict is not nn.Module._save_to_state_dict  # noqa: SLF001
        or type(part)._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001
        for part in module.modules()
        if not isinstance(part, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - reads old versions
    )


def survey_module(
    survey: Survey,
    path: str,
    root: nn.Module,
    *,
    replicated: bool,
    deferred: Callable[[str, torch.Tensor], bool],
) -> None:
    """Add the tensors of ``root`` to the survey, under names that begin with ``path``.

    Args:
        survey: Where they go.
        path: The module's place in the user's mapping.
        root: The module, wrapped or not.
        replicated: All ranks are known to hold the same (there is one rank).
        deferred: Tells which parameters only an optimizer's step writes.
    """
    sharded = [module for module in root.modules() if _is_fsdp(module)]
    if sharded:
        # Before the tables are looked at: after a forward without a backward they hold whole
        # parameters, which their owner throws away.
        survey.sources.append(lambda: _reshard(sharded))
        _reshard(sharded)
    homes = _ddp_homes(root)
    default = Home.SHARED if replicated else Home.RANK
    for base, module in parts(path, root, remove_duplicate=False):
        refused = {cls.__name__ for cls in type(module).__mro__} & _REFUSED_MODULES
        if refused:
            raise InvalidRequestError(f"not supported yet: {base} is a {refused.pop()}", key=base)
        for name, tensor in _persistent(module):
            fqn = f"{base}.{name}"
            survey.add(
                fqn,
                tensor,
                home=default if replicated else homes.get(id(tensor), default),
                deferred=isinstance(tensor, nn.Parameter) and deferred(fqn, tensor),
            )
    tables: list[dict[str, Any]] = []
    for module in root.modules():
        tables += (module._parameters, module._buffers, module._modules)  # noqa: SLF001
    survey.sources.append(lambda: chain.from_iterable(map(dict.values, tables)))
    survey.static[path] = SavedModule()
    survey.extras += extra_states(path, root)


def wrappers(path: str, root: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield name and module of every DDP wrapper in ``root``, itself included."""
    for name, module in parts(path, root):
        if isinstance(module, DistributedDataParallel):
            yield name, module


def extra_states(path: str, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of everything below ``root`` that has an extra state."""
    for name, module in parts(path, root):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def load_module(
    path: str,
    root: nn.Module,
    want: Callable[[str, torch.Tensor], None],
    saved: Iterable[str],
) -> list[str]:
    """Call ``want`` with name and tensor for all that is to be filled in place in ``root``.

    Returns:
        Names below ``path`` that were saved and that the module lacks.
    """
    names: set[str] = set()
    for base, module in parts(path, root, remove_duplicate=False):
        for name, tensor in _persistent(module):
            fqn = f"{base}.{name}"
            names.add(fqn)
            want(fqn, tensor)
    return [fqn for fqn in saved if fqn.startswith(f"{path}.") and fqn not in names]


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module._parameters.items():  # noqa: SLF001
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield name, buffer


def _is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ == _SHARDED_MODULE for cls in type(module).__mro__)


def _reshard(sharded: Iterable[Any]) -> tuple[()]:
    for module in sharded:
        module.reshard()
    return ()


def _ddp_homes(root: nn.Module) -> dict[int, Home]:
    """Return where the tensors of every DDP wrapper below ``root`` belong, by identity."""
    homes: dict[int, Home] = {}
    for _, module in wrappers("", root):
        ignored = cast("set[str]", module.parameters_to_ignore)
        if module.process_group.size() != torch.distributed.get_world_size():
            continue
        for name, parameter in module.module.named_parameters():
            if name not in ignored:
                homes[id(parameter)] = Home.SHARED
        if module.broadcast_buffers:
            for name, buffer in module.module.named_buffers():
                if name not in ignored:
                    homes[id(buffer)] = Home.FIRST
    return homes
