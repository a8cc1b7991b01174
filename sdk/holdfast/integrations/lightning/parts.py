"""The parts of a Lightning training that have a state beside its loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_NUMBER = "holdfast: number of a tensor"
Number = dict[str, list[Any]]
_TABLES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def movers_of(trainer: Any) -> list[object]:
    """Return the optimizers and schedulers that ``trainer`` has now."""
    return [*trainer.optimizers, *_schedulers(trainer)]


def _schedulers(trainer: Any) -> list[object]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def parts_of(trainer: Any) -> dict[str, object]:
    """Return by name what a checkpoint holds of ``trainer``: everything that it trains with."""
    return {
        "model": trainer.strategy.model,
        **{f"optimizer_{number}": one for number, one in enumerate(trainer.optimizers, 1)},
        **{f"scheduler_{number}": one for number, one in enumerate(_schedulers(trainer), 1)},
        "kept": Kept(trainer),
        "logged": Logged(trainer),
        "metrics": Metrics(trainer.lightning_module),
    }


class Kept:
    """What callbacks, data module and precision plugin say of their state.

    Tensors of one number are saved as numbers: a ``ModelCheckpoint`` has one for each of its files,
    and a save of other tensors than the last is planned anew.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._numbers: dict[int, tuple[torch.Tensor, int, Number]] = {}

    def _owners(self) -> Iterator[tuple[str, Any]]:
        for callback in self._trainer.callbacks:
            yield callback.state_key, callback
        if self._trainer.datamodule is not None:
            yield "data module", self._trainer.datamodule
        yield "precision", self._trainer.precision_plugin

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one."""
        states = ((key, owner.state_dict()) for key, owner in self._owners())
        before, self._numbers = self._numbers, {}
        return {key: self._as_numbers(state, before) for key, state in states if state}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Give each its state; those that had none are left alone."""
        for key, owner in self._owners():
            if key in tree:
                owner.load_state_dict(_as_tensors(tree[key]))

    def _as_numbers(self, value: Any, before: Mapping[int, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._as_numbers(one, before) for key, one in value.items()}
        if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
            return value
        tensor, version, number = before.get(id(value), (None, 0, {}))
        if tensor is not value or version != value._version:  # noqa: SLF001 - counts changes
            number = {_NUMBER: [str(value.dtype).removeprefix("torch."), value.item()]}
        self._numbers[id(value)] = value, value._version, number  # noqa: SLF001
        return number


def _as_tensors(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {_NUMBER}:
        kind, number = value[_NUMBER]
        return torch.tensor(number, dtype=getattr(torch, kind))
    return {key: _as_tensors(one) for key, one in value.items()}


class Logged:
    """Logged values: the newest ones, which schedulers and callbacks go by, and sums of an epoch.

    A sum is given back when its value is logged again: only then does Lightning know how it adds
    values up.
    """

    def __init__(self, trainer: Any) -> None:
        self._connector = trainer._logger_connector  # noqa: SLF001
        self._results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return the tables of newest values, and the sums by key."""
        tables = {name: dict(getattr(self._connector, name)) for name in _TABLES}
        kept = {key: one for key, one in self._results.items() if one.is_tensor}
        return {
            "tables": tables,
            # Also of those that were reset: a save of other tensors than the last is planned anew.
            "sums": {k: {n: getattr(one, n) for n in _sums_of(one)} for k, one in kept.items()},
            "reset": [key for key, one in kept.items() if one.has_reset],
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Put the tables back, and have the sums go on."""
        for name, table in tree["tables"].items():
            setattr(self._connector, name, dict(table))
        self._results.clear()
        reset = set(tree["reset"])
        sums = {key: value for key, value in tree["sums"].items() if key not in reset}
        _have_go_on(self._results, sums)


def _have_go_on(results: Any, sums: dict[str, Any]) -> None:
    """Have what is new in a collection of results begin with the sum of its key."""
    kind = type(results)

    def add(self: Any, key: str, metric: Any) -> None:
        for name, value in sums.pop(key, {}).items():
            if name in _sums_of(metric):
                setattr(metric, name, value)
        kind.__setitem__(self, key, metric)

    results.__class__ = type(kind.__name__, (kind,), {"__setitem__": add, "__slots__": ()})


def _sums_of(metric: Any) -> list[str]:
    return [name for name in ("value", "cumulated_batch_size") if hasattr(metric, name)]


class Metrics:
    """The metrics of torchmetrics in a module, which no ``state_dict`` has unless told to."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def _found(self) -> dict[str, Any]:
        named = self._module.named_modules()
        return {name: one for name, one in named if hasattr(one, "_defaults") and _is_metric(one)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each metric, and how often it was updated."""
        return {
            name: {
                "count": metric._update_count,  # noqa: SLF001
                "state": {key: _copied(getattr(metric, key)) for key in metric._defaults},  # noqa: SLF001
            }
            for name, metric in self._found().items()
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Give the metrics their states."""
        for name, metric in self._found().items():
            if name in tree:
                metric._update_count = tree[name]["count"]  # noqa: SLF001
                metric._computed = None  # noqa: SLF001
                for key, value in tree[name]["state"].items():
                    device = metric.device
                    moved = [one.to(device) for one in value] if isinstance(value, list) else value
                    setattr(
                        metric, key, moved.to(device) if isinstance(moved, torch.Tensor) else moved
                    )


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _is_metric(module: object) -> bool:
    kinds = type(module).__mro__
    return any(k.__name__ == "Metric" and k.__module__.startswith("torchmetrics.") for k in kinds)
