"""What a rank saves of an engine: tensors by name, and everything else as a tree.

The names do not depend on stage or degree: ``module.<parameter>`` are the weights that the model
computes with, ``optimizer.fp32.<parameter>`` the master weights, ``optimizer.<key>.<parameter>``
the rest of the optimizer's state. Of what ZeRO cuts, each rank saves a flat range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import InvalidRequestError
from holdfast.format.boxes import Box, whole
from holdfast.format.digest import part_digest
from holdfast.format.names import own_name
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json, encode
from holdfast.integrations.deepspeed import loss_scalers
from holdfast.integrations.deepspeed.partitions import (
    Row,
    is_of_each_element,
    own_range,
    rows_of,
    shape_of,
)
from holdfast.reading.dtypes import dtype_name
from holdfast.snapshot.plan import balance

MODULE, OPTIMIZER, OWN = "module", "optimizer", "deepspeed"
MASTER = "fp32"
OF_THE_MODEL_FILE, OF_THE_OPTIMIZER = "engine", "zero"
DERIVED = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments")
"""What DeepSpeed's file of the model has and the engine that loads knows by itself, or names."""


@dataclass(slots=True)
class Contents:
    """What one rank saves: ``tensors`` are the engine's own memory until they are copied.

    ``stepped`` are numbers of those that only a step of the optimizer writes. ``alike`` are digests
    of values that rank 0 saves for all, by what they are called.
    """

    rank: int
    world_size: int
    specs: list[TensorSpec] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    tree: dict[str, Any] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        box: Box,
        *,
        stepped: bool = False,
    ) -> None:
        """Take a region of a tensor; what is there under this name already is left."""
        if name in self._names:
            return
        self._names.add(name)
        dtype = dtype_name(name, tensor)
        self.specs.append(TensorSpec(fqn=name, dtype=dtype, shape=shape, box=box))
        if stepped and tensor.device.type == "cpu":
            self.stepped.add(len(self.tensors))
        self.tensors.append(tensor)

    def add_whole(self, name: str, tensor: torch.Tensor, *, stepped: bool = False) -> None:
        """Take a whole tensor."""
        shape = tuple(tensor.shape)
        self.add(name, tensor, shape, whole(shape), stepped=stepped)

    def add_values(self, key: str, value: object) -> None:
        """Take a value, with its tensors: those of rank 0 for all, those of others as their own.

        Raises:
            InvalidRequestError: it has something that only pickle could express, named.
        """

        def leaf(found: object, path: str) -> str | None:
            if not isinstance(found, torch.Tensor):
                return None
            name, number = path, 0
            while self._name_of(name) in self._names:  # {"a": {"b": x}, "a.b": y}
                name, number = f"{path}.{number}", number + 1
            self.add_whole(self._name_of(name), found)
            return name

        self.tree.setdefault(OWN, {})[key] = encode(value, path=f"{OWN}.{key}", leaf=leaf)

    def _name_of(self, path: str) -> str:
        return path if self.rank == 0 else own_name(path, self.rank)


def add_model(contents: Contents, engine: Any, state: Mapping[str, Any]) -> None:
    """Take what DeepSpeed saves into the file of the model, and the weights of stage 3.

    Args:
        contents: Where it goes.
        engine: DeepSpeed's engine.
        state: What DeepSpeed would write.

    Raises:
        InvalidRequestError: a value that only pickle could express, named.
    """
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    is_cut = engine.zero_optimization_partition_weights()
    names = {fqn: engine.param_names[p] for fqn, p in parameters.items() if p in engine.param_names}
    module = {fqn: value for fqn, value in state["module"].items() if torch.is_tensor(value)}
    owners: Mapping[str, int] = {}
    if not is_cut:
        sizes = {names[fqn]: tensor.nbytes for fqn, tensor in module.items() if fqn in names}
        owners = balance(list(sizes.items()), [0] * contents.world_size)
    for fqn, tensor in module.items():
        stored = f"{MODULE}.{names.get(fqn, fqn)}"
        if fqn in names and is_cut:
            _add_partition(contents, stored, parameters[fqn])
        elif fqn in names:
            if owners[names[fqn]] == contents.rank:
                contents.add_whole(stored, tensor, stepped=parameters[fqn].requires_grad)
        elif contents.rank == 0:
            contents.add_whole(stored, tensor)
        elif is_cut:
            contents.add_whole(own_name(stored, contents.rank), tensor)
    contents.tree[MODULE] = {fqn: {"$ref": f"{MODULE}.{names.get(fqn, fqn)}"} for fqn in module}
    if contents.rank == 0 or is_cut:
        rest: dict[str, object] = {k: v for k, v in state.items() if k not in DERIVED}
        rest["ds_config"] = json.loads(json.dumps(state.get("ds_config"), default=str))
        rest["extra_state"] = {k: v for k, v in state["module"].items() if k not in module}
        contents.add_values(OF_THE_MODEL_FILE, rest)


def add_optimizer(contents: Contents, engine: Any, state: Mapping[str, Any]) -> None:
    """Take what DeepSpeed saves into the file of a rank's part of a ZeRO optimizer.

    Args:
        contents: Where it goes.
        engine: DeepSpeed's engine.
        state: What its optimizer says of itself.

    Raises:
        InvalidRequestError: a value that only pickle could express, or one that is neither of each
            element nor of a group, named.
    """
    rows = rows_of(engine.optimizer, engine.param_names)
    inner = engine.optimizer.optimizer
    groups = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    scalars: list[dict[str, object]] = [{} for _ in groups]
    keys: list[dict[str, None]] = [{MASTER: None} for _ in groups]
    for row in rows:
        _add_row(contents, row, MASTER, row.weights)
        for key, value in inner.state.get(row.weights, {}).items():
            if is_of_each_element(row, value):
                _add_row(contents, row, key, value.reshape(-1))
                keys[row.group][key] = None
            else:
                _add_scalar(scalars[row.group], key, value)
    contents.tree[OPTIMIZER] = _references(engine, keys)
    scaler = loss_scalers.to_plain(state["loss_scaler"])
    contents.alike.update(_digests({"loss_scaler": [scaler], "groups": groups, "scalars": scalars}))
    if contents.rank == 0:
        contents.add_values(
            OF_THE_OPTIMIZER,
            {
                "loss_scaler": scaler,
                "groups": groups,
                "scalars": scalars,
                "keys": [list(of) for of in keys],
                **{
                    k: state[k]
                    for k in ("dynamic_loss_scale", "overflow", "clip_grad")
                    if k in state
                },
            },
        )


def _add_partition(contents: Contents, stored: str, parameter: Any) -> None:
    begin, count = own_range(parameter)
    if count:
        held = parameter.ds_tensor.detach().reshape(-1)[:count]
        box = Box((begin,), (count,))
        contents.add(stored, held, shape_of(parameter), box, stepped=parameter.requires_grad)


def _add_row(contents: Contents, row: Row, key: str, values: torch.Tensor) -> None:
    for cut in row.ranges:
        held = values.detach()[cut.at : cut.at + cut.count]
        box = Box((cut.begin,), (cut.count,))
        contents.add(f"{OPTIMIZER}.{key}.{cut.fqn}", held, cut.shape, box, stepped=True)


def _add_scalar(scalars: dict[str, object], key: str, value: object) -> None:
    """Take a value that all parameters of a group have in common, such as their step.

    Raises:
        InvalidRequestError: they have not, named.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise InvalidRequestError(
            f"the optimizer keeps {tuple(value.shape)} values as {key!r}, which are neither one of "
            f"each element nor one of all: such state cannot be cut for other ranks",
            key=key,
        )
    if _digest(scalars.setdefault(key, value)) != _digest(value):
        raise InvalidRequestError(
            f"the optimizer keeps different values as {key!r} for parts of one group: such state "
            f"cannot be cut for other ranks",
            key=key,
        )


def _digests(by_kind: Mapping[str, Sequence[Mapping[str, object]]]) -> dict[str, str]:
    """Return a digest of each value of each group, by kind and key."""
    return {
        f"{kind}.{key}": _digest([group.get(key) for group in groups])
        for kind, groups in by_kind.items()
        for key in dict.fromkeys(key for group in groups for key in group)
    }


def _digest(value: object) -> str:
    """Return a digest of a value, with the bits of its tensors.

    Raises:
        InvalidRequestError: a value that only pickle could express, named.
    """

    def leaf(found: object, _path: str) -> str | None:
        if not isinstance(found, torch.Tensor):
            return None
        data = found.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{found.dtype} {tuple(found.shape)} {data.hex()}"

    text = json.dumps(encode(value, path="optimizer", leaf=leaf), sort_keys=True)
    return part_digest(text.encode()).hex()


def _references(engine: Any, keys: list[dict[str, None]]) -> dict[str, Json]:
    """Return the tree of all parameters' state, whichever rank has it."""
    tree: dict[str, dict[str, Json]] = {}
    for group, fqns in enumerate(parameters_by_group(engine)):
        for key in keys[group]:
            held = tree.setdefault(key, {})
            held.update({fqn: {"$ref": f"{OPTIMIZER}.{key}.{fqn}"} for fqn in fqns})
    return dict(tree)


def parameters_by_group(engine: Any) -> list[list[str]]:
    """Return the names of the parameters in each group of a ZeRO optimizer."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "round_robin_bit16_groups"):
        cut = list(enumerate(optimizer.round_robin_bit16_groups))
    else:
        cut = [(optimizer.sub_group_to_group_id[n], g) for n, g in enumerate(optimizer.fp16_groups)]
    found: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    for group, parameters in cut:
        found[group] += [engine.param_names[p] for p in parameters]
    return found
