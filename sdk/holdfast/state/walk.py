"""The walk through the mapping of a state: plain values, and where tensors and objects lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import InvalidRequestError
from holdfast.format.tree import Json, encode
from holdfast.state import kinds
from holdfast.state.kinds import Kind
from holdfast.state.local_boxes import check_kind, is_sharded


@dataclass(slots=True)
class Walk:
    """The tree of the mapping and what was taken out of it; ``known`` objects by identity."""

    known: dict[int, tuple[object, Kind]]
    tree: dict[str, Json] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, key: str, value: object) -> None:
        """Walk a value of the mapping itself, where objects of any class may be.

        Raises:
            InvalidRequestError: a value that cannot be saved; says what to do instead.
        """
        self.tree[key] = encode(value, path=key, leaf=self._leaf_or_cure)

    def encode(self, value: object, path: str) -> Json:
        """Return what an object gave as its state, as JSON; its tensors are taken out.

        Raises:
            InvalidRequestError: a value that cannot be saved.
        """
        return encode(value, path=path, leaf=self._leaf)

    def _leaf_or_cure(self, value: object, path: str) -> str | None:
        name = self._leaf(value, path)
        if name is None:
            kinds.check_nearly_plain(path, value)
        return name

    def _leaf(self, value: object, path: str) -> str | None:
        if isinstance(value, torch.Tensor):
            _check_plain(path, value)
            table: dict[str, Any] = self.tensors
        elif id(value) in self.known or kinds.kind_of(path, value) is not None:
            table = self.objects
        else:
            return None
        if path in self.tensors or path in self.objects:
            raise InvalidRequestError(
                f"two values of the state have the same path {path!r}: rename one of their keys",
                key=path,
            )
        table[path] = value
        return path


def _check_plain(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor beside modules and optimizers that is not all here."""
    check_kind(path, tensor)
    if is_sharded(tensor):
        raise InvalidRequestError(
            f"not supported yet: {path} is a DTensor of its own; a module's or an optimizer's can "
            f"be saved, so register it as a buffer",
            key=path,
        )
