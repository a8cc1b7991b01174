"""Modules: the names of their tensors, and which ranks hold the same.

Names are those of ``state_dict()`` without the wrappers' parts. Tensors are taken from the
modules' own tables, not from ``state_dict()``: a table can be compared by identity, and a
detached alias cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.format.blob import SavedModule
from holdfast.state.fsdp1 import (
    drop_whole_parameters,
    is_flat,
    managed_parameters,
    parameter_lists,
)
from holdfast.state.local_boxes import is_parameter
from holdfast.state.sharded_tensors import seen_at, shards_below, watched
from holdfast.state.survey import Home, Survey

_INNER = {
    "DistributedDataParallel": "module", "DataParallel": "module", "AveragedModel": "module",
    "OptimizedModule": "_orig_mod", "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}  # fmt: skip
"""Of each class that wraps a module: where it keeps it. Names do not show the wrapper."""
Rename = Callable[[str], str]
Managed = Mapping[int, Mapping[str, torch.Tensor]]
"""Tensors by the ``id`` of the module that has them, then by their names in it."""


class _Place(NamedTuple):
    """Whose segment a tensor belongs to; see ``Survey.add``."""

    home: Home
    mesh: tuple[int, ...] = ()
    holders: tuple[int, ...] | None = None


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
        and not _is_metric_without_state(part)
    )


def _is_metric_without_state(part: nn.Module) -> bool:
    """Tell whether it is a metric of torchmetrics that ``state_dict()`` has nothing of."""
    names = ((kind.__module__, kind.__name__) for kind in type(part).__mro__)
    return ("torchmetrics.metric", "Metric") in names and not any(
        cast("Any", part)._persistent.values()  # noqa: SLF001 - has no public name
    )


def survey_module(
    survey: Survey,
    path: str,
    root: nn.Module,
    *,
    replicated: bool,
    deferred: Callable[[str, torch.Tensor], bool],
    rename: Rename = str,
    alone: tuple[int, ...] = (),
) -> None:
    """Add the tensors of ``root`` to the survey, under names that begin with ``path``.

    Args:
        survey: Where they go.
        path: The module's place in the user's mapping.
        root: The module, wrapped or not.
        replicated: All ranks are known to hold the same (there is one rank).
        deferred: Tells which parameters only an optimizer's step writes.
        rename: Returns what a name is called in the whole model.
        alone: This rank, if ``root`` is a section of a model: what is not known to be on others is
            on this rank alone.
    """
    sharded = [module for module in root.modules() if _is_fsdp(module)]
    if sharded:
        # Before the tables are looked at: after a forward without a backward they hold whole
        # parameters, which their owner throws away.
        survey.sources.append(lambda: _reshard(sharded))
        _reshard(sharded)
    places = {} if replicated else _ddp_places(root)
    default = _Place(Home.HOLDERS, alone) if alone else _Place(Home.RANK)
    if replicated:
        default = _Place(Home.SHARED)
    managed = _managed(path, root)
    for base, module in parts(path, root, remove_duplicate=False):
        for name, tensor in _persistent(module, managed):
            fqn = named_in_model(path, f"{base}.{name}", rename)
            place = places.get(id(tensor), default)
            survey.add(
                fqn,
                tensor,
                home=place.home,
                deferred=is_parameter(tensor) and deferred(fqn, tensor),
                mesh=place.mesh,
                holders=place.holders,
            )
    tables: list[dict[str, Any]] = []
    left_out: list[set[str]] = []
    for module in root.modules():
        tables += (module._buffers, module._modules)  # noqa: SLF001
        left_out.append(module._non_persistent_buffers_set)  # noqa: SLF001
        if id(module) not in managed:
            tables.append(module._parameters)  # noqa: SLF001
    survey.sources.append(lambda: chain.from_iterable(map(dict.values, tables)))
    survey.keys.append(lambda: chain(map(len, tables), chain.from_iterable(tables)))
    survey.keys.append(lambda: chain.from_iterable(left_out))
    if managed:
        lists = parameter_lists(root)
        shards = watched(root)
        survey.sources.append(lambda: chain.from_iterable(lists))
        survey.sources.append(lambda: seen_at(shards))
        survey.sources.append(lambda: _unmanaged(root, managed))
    survey.static[path] = SavedModule(section=bool(alone))
    for name, module in extra_states(path, root):
        survey.extras.append((named_in_model(path, name, rename), module))


def names(path: str, root: nn.Module) -> Iterator[str]:
    """Yield the names of all tensors that are saved of ``root``, called ``path``."""
    managed = _managed(path, root)
    for base, module in parts(path, root, remove_duplicate=False):
        for name, _ in _persistent(module, managed):
            yield f"{base}.{name}"


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
    rename: Rename = str,
) -> list[str]:
    """Call ``want`` with name and tensor for all that is to be filled in place in ``root``.

    ``rename`` returns what a name is called in the whole model.

    Returns:
        Names below ``path`` that were saved and that the module lacks.
    """
    names: set[str] = set()
    managed = _managed(path, root)
    if managed:
        drop_whole_parameters(root)
    for base, module in parts(path, root, remove_duplicate=False):
        for name, tensor in _persistent(module, managed):
            fqn = named_in_model(path, f"{base}.{name}", rename)
            names.add(fqn)
            want(fqn, tensor)
    return [fqn for fqn in saved if fqn.startswith(f"{path}.") and fqn not in names]


def _managed(path: str, root: nn.Module) -> Managed:
    """Return what is taken in place of what stands in modules' tables, or does not stand there."""
    some = managed_parameters(path, root), shards_below(path, root)
    return {
        key: dict(chain.from_iterable(of.get(key, {}).items() for of in some))
        for key in chain(*some)
    }


def _persistent(module: nn.Module, managed: Managed) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in _parameters(module, managed).items():
        if parameter is not None and not is_flat(parameter):
            yield name, parameter
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield name, buffer


def _parameters(module: nn.Module, managed: Managed) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters of a module, whatever FSDP1 has put into its table for now."""
    table: Mapping[str, torch.Tensor | None] = module._parameters  # noqa: SLF001
    if id(module) not in managed:
        return table
    # In an order that no forward changes: it takes parameters out and puts them in again.
    return dict(sorted({**table, **managed[id(module)]}.items()))


def _unmanaged(root: nn.Module, managed: Managed) -> Iterator[nn.Parameter | None]:
    """Yield what the tables of such modules have beside."""
    for module in root.modules():
        if id(module) in managed:
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if name not in managed[id(module)]:
                    yield parameter


def _is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ == _SHARDED_MODULE for cls in type(module).__mro__)


def _reshard(sharded: Iterable[Any]) -> tuple[()]:
    for module in sharded:
        module.reshard()
    return ()


def _ddp_places(root: nn.Module) -> dict[int, _Place]:
    """Return where the tensors of every DDP wrapper below ``root`` belong, by identity."""
    places: dict[int, _Place] = {}
    for _, module in wrappers("", root):
        ignored = cast("set[str]", module.parameters_to_ignore)
        parameters, buffers = _ddp_group(module)
        for name, parameter in module.module.named_parameters():
            if name not in ignored:
                places[id(parameter)] = parameters
        if module.broadcast_buffers:
            for name, buffer in module.module.named_buffers():
                if name not in ignored:
                    places[id(buffer)] = buffers
    return places


def _ddp_group(module: DistributedDataParallel) -> tuple[_Place, _Place]:
    """Return where a wrapper's parameters belong, and its buffers: the first rank's count."""
    if module.process_group.size() == torch.distributed.get_world_size():
        return _Place(Home.SHARED), _Place(Home.FIRST)
    ranks = torch.distributed.get_process_group_ranks(module.process_group)
    mesh = tuple(sorted(ranks))
    return _Place(Home.HOLDERS, mesh), _Place(Home.HOLDERS, mesh, (ranks[0],))


def named_in_model(path: str, fqn: str, rename: Rename) -> str:
    """Return what ``fqn``, which is ``path`` or inside it, is called in the whole model.

    >>> named_in_model("m", "m.0.weight", lambda name: f"body.{name}")
    'm.body.0.weight'
    """
    return ".".join(filter(None, (path, rename(fqn[len(path) :].removeprefix(".")))))
