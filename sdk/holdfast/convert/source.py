"""What every format is read through: whole tensors by name, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.errors import InvalidRequestError, ManifestError, NotFoundError
from holdfast.format.boxes import addressable, whole
from holdfast.format.segment import ITEM_BYTES, TensorSpec


class TensorSource(Protocol):
    """Tensors that can be read one at a time; every box of ``specs`` is the whole tensor."""

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors in an order that is good to read in, the same each time."""
        ...

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors in this order; nobody else writes into their memory."""
        ...

    def state(self) -> Mapping[int, Any]:
        """Return the JSON that each rank saved besides tensors, by rank; empty if unknown."""
        ...

    def values(self) -> Mapping[str, Any]:
        """Return what other tools saved besides tensors, as JSON trees by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which tensors are wanted and how they are called in the result.

    ``only`` and ``strip`` end at a dot: ``model`` means ``model.*``. ``add`` goes before.
    """

    only: tuple[str, ...] = ()
    strip: str = ""
    add: str = ""

    @property
    def everything(self) -> bool:
        """Whether nothing is left out or renamed."""
        return not (self.only or self.strip or self.add)

    def names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the new name of each that is wanted, by its old name.

        Raises:
            NotFoundError: none is wanted.
            InvalidRequestError: two would have one name.

        >>> Selection(only=("model",), strip="model").names(["model.w", "optimizer.w"])
        {'model.w': 'w'}
        """
        chosen = {name: self._rename(name) for name in names if _under(name, self.only)}
        if not chosen:
            below = " or ".join(map(repr, self.only))
            raise NotFoundError(f"the source has no tensor{f' below {below}' if below else ''}")
        taken: dict[str, str] = {}
        for old, new in chosen.items():
            if taken.setdefault(new, old) != old:
                raise InvalidRequestError(f"{old!r} and {taken[new]!r} would both be {new!r}")
        return chosen

    def _rename(self, name: str) -> str:
        if self.strip:
            name = name.removeprefix(f"{self.strip.rstrip('.')}.")
        return f"{self.add.rstrip('.')}.{name}" if self.add else name


class Chosen:
    """A source seen through a selection. Rank and foreign state go along only with everything."""

    def __init__(self, source: TensorSource, selection: Selection) -> None:
        self._source = source
        specs = source.specs()
        self._new = selection.names(spec.fqn for spec in specs)
        self._old = {new: old for old, new in self._new.items()}
        self._specs = [
            spec._replace(fqn=self._new[spec.fqn]) for spec in specs if spec.fqn in self._new
        ]
        self._whole = selection.everything

    def specs(self) -> Sequence[TensorSpec]:
        """Return those selected, under their new names."""
        return self._specs

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors by their new names."""
        for old, tensor in self._source.tensors([self._old[name] for name in names]):
            yield self._new[old], tensor

    def state(self) -> Mapping[int, Any]:
        """Return the ranks' state; nothing when only some tensors are wanted."""
        return self._source.state() if self._whole else {}

    def values(self) -> Mapping[str, Any]:
        """Return the foreign values; nothing when only some tensors are wanted."""
        return self._source.values() if self._whole else {}


def spec_of(name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
    """Return the spec of a whole tensor.

    Raises:
        ManifestError: no tensor can have the shape.
    """
    if not addressable(shape, ITEM_BYTES[dtype]):
        raise ManifestError(f"tensor {name!r} has the shape {shape}, which no memory can have")
    return TensorSpec(fqn=name, dtype=dtype, shape=tuple(shape), box=whole(shape))


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of ``tensor``, row-major; no copy when it is contiguous.

    Of one that torch keeps as the conjugate or the negative of its memory: what it reads as.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _under(name: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or name.startswith(tuple(f"{one.rstrip('.')}." for one in prefixes))
