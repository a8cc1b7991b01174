"""What a restore will read, and what it will put in place once all of it has been read.

Collected first, so that whatever is refused is refused before a byte changes: neither a tensor of
the user's nor the state of an optimizer has been touched by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.boxes import Box, in_rows
from holdfast.format.segment import TensorSpec
from holdfast.reading.dtypes import TORCH, check_memory
from holdfast.reading.reader import Segments, Want
from holdfast.state import blanks
from holdfast.state.layouts import empty_in_layout, is_expanded
from holdfast.state.local_boxes import local_box, shape_of

COMPARED_BYTES_MAX = 8 << 20
"""Of each of two tensors that must be equal, at a time; or one row, if that is more."""


class _Equal(NamedTuple):
    """The region ``box`` must be the same in all ``stored``; ``why`` it is refused if not."""

    fqn: str
    box: Box
    stored: tuple[str, ...]
    why: str


class Wants:
    """The targets of one restore and what is to be done after it."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._specs = segments.specs()
        self._wants: list[Want] = []
        self._alone: list[Want] = []
        self._equals: list[_Equal] = []
        self._filled: set[int] = set()
        self._after: list[Callable[[], None]] = []

    def has(self, stored: str) -> bool:
        """Tell whether any part of the tensor is in the checkpoint."""
        return stored in self._specs

    def spec(self, stored: str) -> TensorSpec:
        """Return dtype and shape of a tensor of the checkpoint.

        Raises:
            NotReadyError: there is none of this name.
        """
        found = self._specs.get(stored)
        if found is None:
            raise NotReadyError(f"the checkpoint has no tensor {stored!r}", fqn=stored)
        return found

    def fill(
        self, fqn: str, target: torch.Tensor, stored: str, of: torch.Tensor | None = None
    ) -> None:
        """Have ``target``, called ``fqn`` here, hold the tensor ``stored`` of the checkpoint.

        ``of`` is the parameter of which it is a state; see ``local_box``.

        Raises:
            InvalidRequestError: shape or dtype differ, or ``target`` is expanded or on the meta
                device; the message names it.
        """
        here = local_box(fqn, target, of)
        check_fillable(fqn, here.tensor)
        self._check_fits(fqn, here.shape, target.dtype, stored)
        self._add(Want(here.tensor.detach(), stored, here.box))

    def fill_alone(self, fqn: str, target: torch.Tensor, stored: str) -> bool:
        """Have ``target`` filled if it is as it was saved, and nothing else is to fill its memory.

        By ``read_alone``, not ``run`` itself.

        Returns:
            Whether it will be.

        Raises:
            InvalidRequestError: as ``fill`` says.
        """
        if not fits(target, self.spec(stored)) or _memory(target) in self._filled:
            return False
        self.fill(fqn, target, stored)
        self._alone.append(self._wants.pop())
        return True

    def read_alone(self) -> None:
        """Read what ``fill_alone`` has taken: after objects were loaded, which may write to it."""
        self._segments.read(self._alone)

    def make(self, fqn: str, target: torch.Tensor, stored: str) -> None:
        """Have ``target``, which has no memory, get new memory that holds the tensor ``stored``.

        Raises:
            InvalidRequestError: as ``fill`` says, or it cannot be given memory; see ``blanks``.
        """
        here = local_box(fqn, target)
        self._check_fits(fqn, here.shape, target.dtype, stored)
        memory = blanks.new_memory(fqn, target)
        self._add(Want(memory, stored, here.box))
        self.then(partial(blanks.put, target, memory))

    def _check_fits(
        self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, stored: str
    ) -> None:
        spec = self.spec(stored)
        if shape != spec.shape or dtype != TORCH[spec.dtype]:
            raise InvalidRequestError(
                f"tensor {fqn!r} is {shape} {dtype} now and was saved as "
                f"{spec.shape} {TORCH[spec.dtype]}: build the model as it was saved, or use "
                f"another job name"
            )

    def _add(self, want: Want) -> None:
        self._wants.append(want)
        self._filled.add(_memory(want.target))

    def equal(self, fqn: str, target: torch.Tensor, stored: Sequence[str], why: str) -> None:
        """Have the restore refused unless what ``target`` is filled with is the same in all.

        Args:
            fqn: What it is called here.
            target: Its region is what is compared; all, of a number beside it, such as its steps.
            stored: Names of the tensors in the checkpoint.
            why: The error's text, should they differ.

        Raises:
            InvalidRequestError: shapes or dtypes differ.
        """
        kinds = {(spec.shape, spec.dtype) for spec in map(self.spec, stored)}
        if len(kinds) > 1:
            raise InvalidRequestError(why, key=fqn)
        spec = self.spec(stored[0])
        box = local_box(fqn, target).box if spec.shape == shape_of(target) else spec.box
        self._equals.append(_Equal(fqn, box, tuple(stored), why))

    def new(self, stored: str, dims: object = None) -> torch.Tensor:
        """Return new memory on the CPU that will hold the tensor ``stored``.

        Args:
            stored: Its name in the checkpoint.
            dims: How its dims lie in memory; see ``layouts``.
        """
        spec = self.spec(stored)
        target = empty_in_layout(spec.shape, TORCH[spec.dtype], dims)
        self._wants.append(Want(target, stored, spec.box))
        return target

    def then(self, put: Callable[[], None]) -> None:
        """Have ``put`` called once everything has been read, after those before it."""
        self._after.append(put)

    def run(self) -> None:
        """Read everything, then put it in place.

        Raises:
            InvalidRequestError: tensors that must be equal differ; nothing has changed.
        """
        for equal in self._equals:
            self._check(equal)
        self._segments.read(self._wants)
        after, self._after = self._after, []  # what is to be done knows who asked for it
        for put in after:
            put()

    def _check(self, equal: _Equal) -> None:
        dtype = TORCH[self.spec(equal.stored[0]).dtype]
        for box in in_rows(equal.box, COMPARED_BYTES_MAX // dtype.itemsize):
            first, other = (torch.empty(box.lengths, dtype=dtype) for _ in range(2))
            self._segments.read([Want(first, equal.stored[0], box)])
            for name in equal.stored[1:]:
                self._segments.read([Want(other, name, box)])
                # By bits: a NaN is equal to itself.
                if not torch.equal(_bits(first), _bits(other)):
                    raise InvalidRequestError(equal.why, key=equal.fqn)


def _memory(tensor: torch.Tensor) -> int:
    # Not where it lies: a subclass that holds another tensor does not say that.
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def fits(target: torch.Tensor, spec: TensorSpec, of: torch.Tensor | None = None) -> bool:
    """Tell whether ``target``, a state of ``of`` if that is given, is of the shape and dtype."""
    return shape_of(target, of) == spec.shape and target.dtype == TORCH[spec.dtype]


def check_fillable(fqn: str, target: torch.Tensor) -> None:
    """Refuse a tensor that cannot hold what was saved.

    Raises:
        InvalidRequestError: its elements share memory, or it has none.
    """
    if target.is_meta:
        raise InvalidRequestError(
            f"tensor {fqn!r} is on the meta device and has no memory for its values: call "
            f"to_empty(device=...) on its module before the restore",
            key=fqn,
        )
    check_memory(fqn, target)
    if is_expanded(target):
        raise InvalidRequestError(
            f"the elements of tensor {fqn!r} share memory (expand): make it contiguous()", key=fqn
        )
