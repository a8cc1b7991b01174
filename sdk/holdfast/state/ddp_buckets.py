"""The order in which DDP adds gradients up: taken from a wrapper, put back into another.

DDP sums gradients bucket by bucket, and with three or more ranks the order of a sum depends on a
gradient's place in its bucket. A process begins with buckets by registration and rebuilds them
once, by the order in which the gradients of its first backward arrived; a resumed process would
begin anew, and round its first step differently from the run that was not interrupted.

torch has no call to set the order. But a reducer that is told that all gradients have arrived
takes them in the order of its parameters, and rebuilds its buckets so in the next forward, as
every process does in its second. So the reducer is made anew, as DDP does when it is unpickled,
with its parameters in the order that was saved. Nothing runs, no gradient is ddp.

Source: ``DistributedDataParallel._ddp_init_helper``, ``_pre_forward``, ``_DDPJoinHook``.
"""
# ruff: noqa: SLF001 - torch has no public names for this; each is looked for before it is used

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from holdfast.format.tree import Json

_NEEDED = ("_ddp_init_helper", "_build_params_for_reducer", "_has_rebuilt_buckets", "logger")
_NEEDED_OF_REDUCER = ("_push_all_rebuilt_params", "get_backward_stats", "_remove_autograd_hooks")
Ddp = Any  # a DistributedDataParallel: what is used of it has no types
_HASH_BYTES = 8


class BucketOrder:
    """The order of one wrapper; ``known`` is the same object as long as it has not changed.

    Indices are those of the wrapper's parameters that learn, in the order of registration.
    """

    def __init__(self, ddp: Ddp, name_of: Callable[[torch.Tensor], str]) -> None:
        self.ddp = ddp
        self._missing = _missing(ddp)
        parameters = [] if self._missing else ddp._build_params_for_reducer()[0]
        self._names = _hash(map(name_of, parameters))
        self._order = list(range(len(parameters)))  # that of the reducer's parameters
        self._known: Json = None
        self._final = bool(self._missing)

    def known(self) -> Json:
        """Return the order of the next backward; None: the order of registration, or not known."""
        if self._final:
            return self._known
        rebuilt = self.ddp._has_rebuilt_buckets
        found = _rebuilt(self.ddp) if rebuilt else _arrived(self.ddp)
        if found and sorted(found) == sorted(self._order):
            runs = _runs([self._order[index] for index in found])
            now: Json = {"names": self._names, "runs": cast("Json", runs)}
            self._known = self._known if now == self._known else now
            self._final = rebuilt
        return self._known

    def put(self, saved: Json) -> str:
        """Make the next backward go by ``saved``; collective, all ranks do it or none.

        Returns:
            Why it cannot be done; empty if it was, or need not be.
        """
        if self._missing:
            return f"torch {torch.__version__} has no {self._missing}"
        if saved is None:
            early = "of a static graph it is known from the second step on"
            return early if self.ddp.static_graph else ""
        order, reason = self._read(saved)
        if not _agreed(self.ddp, fit=not reason):
            return reason or "it cannot be done on another rank"
        _remake(self.ddp, order)
        self._order, self._known, self._final = order, saved, False
        return ""

    def _read(self, saved: Any) -> tuple[list[int], str]:
        try:
            order = [index for run in saved["runs"] for index in _unrolled(run, len(self._order))]
        except (KeyError, TypeError, ValueError):
            order = []
        if not order or saved.get("names") != self._names or sorted(order) != sorted(self._order):
            return [], "other parameters learn here than in the run that was saved"
        reason = _unfit(self.ddp, len(order))
        return ([], reason) if reason else (order, "")


def is_rebuilt(ddp: Ddp) -> bool:
    """Tell whether torch rebuilds the buckets of this wrapper, on all ranks alike."""
    everywhere = ddp.process_group.size() == dist.get_world_size() > 1
    return everywhere and (ddp.static_graph or not ddp.find_unused_parameters)


def _missing(ddp: Ddp) -> str:
    """Return what this version of torch lacks of all that is used here, or nothing."""
    wanted = [(ddp, name) for name in _NEEDED]
    wanted += [(ddp.reducer, name) for name in _NEEDED_OF_REDUCER]
    return next((name for owner, name in wanted if not hasattr(owner, name)), "")


def _unfit(ddp: Ddp, count: int) -> str:
    """Return the reason why rebuilding the reducer would change its results."""
    hook = ddp._get_ddp_logging_data().get("comm_hook")
    if ddp.mixed_precision is not None:
        return "mixed precision of DDP itself keeps the places of its parameters"
    if hook and not ddp._comm_hooks:
        return f"the built-in hook {hook} cannot be registered again"
    if {count} != {len(ddp.reducer.get_backward_stats()), len(ddp._build_params_for_reducer()[0])}:
        return "parameters were frozen or freed after DDP had been made"
    return ""


def _rebuilt(ddp: Ddp) -> list[int]:
    """Return the reducer's indices as they lie in its rebuilt buckets."""
    if not ddp._get_ddp_logging_data().get("has_rebuilt_buckets"):
        ddp.logger.set_runtime_stats_and_log()  # as each of the first forwards does
    text = str(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    return [int(index) for index in re.findall(r"\d+", text)]


def _arrived(ddp: Ddp) -> list[int]:
    """Return the reducer's indices as their gradients arrived in the last backward, if all did."""
    times = list(ddp.reducer.get_backward_stats())
    return sorted(range(len(times)), key=times.__getitem__) if all(times) else []


def _agreed(ddp: Ddp, *, fit: bool) -> bool:
    """Tell whether every rank of the group is ``fit``: all do it, or none.

    A reducer with another order than its peers would add up gradients of different parameters.
    """
    device = next(ddp.module.parameters()).device
    votes = torch.tensor(int(fit), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=ddp.process_group)
    return bool(votes)


def _remake(ddp: Ddp, order: Sequence[int]) -> None:
    parameters, sparse = ddp._build_params_for_reducer()
    parameters, sparse = [[of[index] for index in order] for of in (parameters, sparse)]
    ddp.reducer._remove_autograd_hooks()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        cast("Any", dist)._register_comm_hook(ddp.reducer, state, hook)
    ddp.reducer._push_all_rebuilt_params()


def _runs(order: Sequence[int]) -> list[list[int]]:
    """Return the first and last of every run of neighbours, up or down.

    >>> _runs([5, 4, 3, 0, 1, 7])
    [[5, 3], [0, 1], [7, 7]]
    """
    runs: list[list[int]] = []
    for index in order:
        if runs:
            first, last = runs[-1]
            if abs(index - last) == 1 and (first == last or (index > last) == (last > first)):
                runs[-1][1] = index
                continue
        runs.append([index, index])
    return runs


def _unrolled(run: Sequence[int], count: int) -> range:
    first, last = run
    if not (0 <= first < count and 0 <= last < count):
        raise ValueError(f"a run from {first} to {last} among {count}")
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)


def _hash(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=_HASH_BYTES).hexdigest()
