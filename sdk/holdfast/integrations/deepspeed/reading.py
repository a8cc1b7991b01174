"""What DeepSpeed reads of a checkpoint, cut for the engine that loads: its stage, degree and rank.

What a file has is made of the engine's own description of itself, with the values of the
checkpoint: so DeepSpeed sees what it would have written with these ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Any, Self, cast

import torch

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.holding import opened
from holdfast.errors import InvalidRequestError, NotFoundError, NotReadyError
from holdfast.format import blob as blobs
from holdfast.format.boxes import Box, whole
from holdfast.format.manifest import Manifest
from holdfast.format.names import own_name
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json, decode
from holdfast.integrations.deepspeed import loss_scalers
from holdfast.integrations.deepspeed.contents import (
    MASTER,
    MODULE,
    OF_THE_MODEL_FILE,
    OF_THE_OPTIMIZER,
    OPTIMIZER,
    OWN,
)
from holdfast.integrations.deepspeed.partitions import Row, own_range, rows_of, shape_of
from holdfast.reading.dtypes import TORCH
from holdfast.reading.folder import open_folder
from holdfast.reading.reader import Want
from holdfast.state.values import make_numpy


class SavedEngine:
    """A checkpoint that is open for one engine; a context manager.

    Every part is verified before its bytes are used, and nothing is unpickled.

    Args:
        folder: Where it lies.
        engine: DeepSpeed's engine.
        weights_only: With stage 3, take the weights and leave the optimizer's state as it is, but
            for the master weights, which are then the weights.

    Raises:
        NotFoundError: there is no checkpoint in the folder.
        CheckpointError: see ``holdfast.load``.
    """

    def __init__(self, folder: str, engine: Any, *, weights_only: bool = False) -> None:
        self._engine = engine
        self._weights_only = weights_only
        self._folder = folder
        with ExitStack() as kept:
            checkpoint = kept.enter_context(opened(folder))
            manifest = _manifest(checkpoint, folder)
            self.run = manifest.checkpoint.run
            self._reader = kept.enter_context(open_folder(checkpoint, manifest))
            self._kept = kept.pop_all()
        self._specs: Mapping[str, TensorSpec] = self._reader.specs()
        self._tree = cache(self._read_tree)
        self._model_files: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kept.__exit__(kind, error, trace)

    def model_file(self, rank: int) -> dict[str, Any]:
        """Return what the file of the model has for the engine.

        Args:
            rank: The one whose file DeepSpeed reads. Values of ranks are those of the rank of that
                number, modulo the number that saved them.
        """
        if rank not in self._model_files:
            self._model_files[rank] = self._model_file(rank % self._reader.world_size)
        return dict(self._model_files[rank])

    def optimizer_file(self) -> dict[str, Any]:
        """Return what the file of this rank's part of the optimizer has for the engine.

        Raises:
            InvalidRequestError: it was saved without ZeRO, or with other groups of parameters.
            NotReadyError: a parameter of the engine is not in the checkpoint.
        """
        optimizer = self._engine.optimizer
        state = optimizer.state_dict()
        masters = "fp32_flat_groups"
        if "single_partition_of_fp32_groups" in state:
            masters = "single_partition_of_fp32_groups"
        if self._weights_only:
            # ``_take_weights`` has filled these, of which DeepSpeed makes its weights again.
            state[masters] = [flat.clone() for flat in optimizer.fp16_partitioned_groups_flat]
            return {"optimizer_state_dict": state}
        kept = self._tree(0).get(OWN, {}).get(OF_THE_OPTIMIZER)
        if kept is None:
            raise InvalidRequestError(
                f"{self._folder} was saved without ZeRO and its optimizer cannot be cut: load it "
                f"without ZeRO, or with load_optimizer_states=False"
            )
        saved = cast("dict[str, Any]", self._values(kept, 0))
        rows = rows_of(optimizer, self._engine.param_names)
        held = [self._row(row, saved["keys"][row.group]) for row in rows]
        inner = (
            "base_optimizer_state" if "base_optimizer_state" in state else "optimizer_state_dict"
        )
        state[masters] = [values.pop(MASTER) for values in held]
        state[inner] = _inner_state(self._folder, state[inner]["param_groups"], rows, held, saved)
        state["loss_scaler"] = loss_scalers.from_plain(saved["loss_scaler"])
        known = ("dynamic_loss_scale", "overflow", "clip_grad")
        state.update({key: saved[key] for key in known if key in saved and key in state})
        return {"optimizer_state_dict": state}

    def _model_file(self, source: int) -> dict[str, Any]:
        tree = self._tree(source)
        if OF_THE_MODEL_FILE not in tree.get(OWN, {}):
            source, tree = 0, self._tree(0)
        engine = self._engine
        rest = cast("dict[str, Any]", self._values(tree[OWN][OF_THE_MODEL_FILE], source))
        extra = rest.pop("extra_state", {})
        module = self._module(tree[MODULE], source)
        module.update(extra)
        zero = bool(engine.zero_optimization())
        if self._weights_only:
            self._take_weights()
        return {
            **rest,
            "module": module,
            "param_shapes": engine._get_zero_param_shapes() if zero else None,  # noqa: SLF001
            "frozen_param_fragments": self._frozen(),
            "dp_world_size": engine.seq_dp_world_size,
            "mp_world_size": engine.mp_world_size,
        }

    def _module(self, saved: Mapping[str, Json], source: int) -> OrderedDict[str, Any]:
        """Return the model's table; what is cut here stands for itself, as the model has it."""
        here: dict[str, Any] = {}
        if self._engine.zero_optimization_partition_weights():
            here = {
                fqn: parameter.detach()
                for fqn, parameter in self._engine.module.named_parameters(remove_duplicate=False)
                if parameter in self._engine.param_names
            }
        found = self._values({k: v for k, v in saved.items() if k not in here}, source)
        there = cast("dict[str, Any]", found)
        return OrderedDict((fqn, here[fqn] if fqn in here else there[fqn]) for fqn in saved)

    def _frozen(self) -> dict[str, torch.Tensor] | None:
        """Return the weights that no optimizer has, cut as they are here; None: not saved."""
        wants, found = [], {}
        for parameter, name in self._engine.param_names.items():
            if parameter.requires_grad and shape_of(parameter) and 0 not in shape_of(parameter):
                continue
            stored = f"{MODULE}.{name}"
            spec = self._specs.get(stored)
            if spec is None:
                return None
            if not hasattr(parameter, "ds_tensor"):
                found[name] = torch.empty(spec.shape, dtype=TORCH[spec.dtype])
                wants.append(Want(found[name], stored, whole(spec.shape)))
                continue
            begin, count = own_range(parameter)
            held = torch.zeros(parameter.ds_tensor.numel(), dtype=TORCH[spec.dtype])
            found[name] = held.view(parameter.ds_tensor.shape)
            wants.append(Want(held[:count], stored, Box((begin,), (count,))))
        self._reader.read([want for want in wants if want.target.numel()])
        return found

    def _take_weights(self) -> None:
        """Fill what this rank has of each parameter with stage 3."""
        wants, targets = [], []
        for parameter, name in self._engine.param_names.items():
            begin, count = own_range(parameter)
            if count:
                spec = self._spec(f"{MODULE}.{name}", shape_of(parameter))
                held = torch.empty(count, dtype=TORCH[spec.dtype])
                wants.append(Want(held, spec.fqn, Box((begin,), (count,))))
                targets.append(parameter.ds_tensor.detach().view(-1)[:count])
        self._reader.read(wants)
        for target, want in zip(targets, wants, strict=True):
            target.copy_(want.target)

    def _row(self, row: Row, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return what the checkpoint has for a row, by key; between parameters there are zeros."""
        held, wants = {}, []
        for key in keys:
            specs = [self._spec(f"{OPTIMIZER}.{key}.{cut.fqn}", cut.shape) for cut in row.ranges]
            dtype = TORCH[specs[0].dtype] if specs else row.weights.dtype
            held[key] = torch.zeros(row.weights.numel(), dtype=dtype)
            for cut, spec in zip(row.ranges, specs, strict=True):
                target = held[key][cut.at : cut.at + cut.count]
                wants.append(Want(target, spec.fqn, Box((cut.begin,), (cut.count,))))
        self._reader.read(wants)
        return held

    def _spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None:
            raise NotReadyError(f"{self._folder} has no tensor {name!r}", fqn=name)
        if spec.shape != shape:
            raise InvalidRequestError(
                f"tensor {name!r} is {spec.shape} in the checkpoint and {shape} here", key=name
            )
        return spec

    def _values(self, saved: Json, rank: int) -> object:
        """Return a tree, with its tensors read; one that is named twice is one tensor."""
        found: dict[str, torch.Tensor] = {}

        def leaf(name: str) -> torch.Tensor:
            own = own_name(name, rank)
            stored = own if own in self._specs else name
            if stored not in found:
                spec = self._specs.get(stored)
                if spec is None:
                    raise NotReadyError(f"{self._folder} has no tensor {name!r}", fqn=name)
                found[stored] = torch.empty(spec.shape, dtype=TORCH[spec.dtype])
            return found[stored]

        value = decode(saved, leaf=leaf, numpy=make_numpy, size=torch.Size)
        self._reader.read([Want(t, name, whole(t.shape)) for name, t in found.items()])
        return value

    def _read_tree(self, rank: int) -> dict[str, Any]:
        return dict(blobs.decode(self._reader.blob(rank)).live.tree)


def _manifest(checkpoint: CheckpointFolder, folder: str) -> Manifest:
    try:
        return checkpoint.manifest()
    except NotFoundError as cause:
        raise NotFoundError(
            f"{folder} holds no whole checkpoint of Holdfast; what DeepSpeed has written itself is "
            f"a pickle and is not read"
        ) from cause


def _inner_state(
    folder: str,
    here: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    held: Sequence[Mapping[str, torch.Tensor]],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state of the optimizer that ZeRO drives, for its ``load_state_dict``."""
    if len(here) != len(saved["groups"]):
        raise InvalidRequestError(
            f"the optimizer has {len(here)} groups of parameters and had {len(saved['groups'])} "
            f"when {folder} was saved: give it the same groups"
        )
    numbers = [iter(group["params"]) for group in here]
    state: dict[int, dict[str, Any]] = {}
    for row, values in zip(rows, held, strict=True):
        number = next(numbers[row.group])
        scalars = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in saved["scalars"][row.group].items()
        }
        if values or scalars:
            state[number] = {**scalars, **values}
    groups = [
        {**there, "params": list(group["params"])}
        for there, group in zip(saved["groups"], here, strict=True)
    ]
    return {"state": state, "param_groups": groups}
