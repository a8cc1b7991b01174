"""Where gradients of which parameter group lie, so that their norms take a few calls for a bucket.

Each parameter is cut into views of bounded length, and each view has a place in one vector of
norms: by group, parameter and position, never by bucket. So a sum over a group is the same bit for
bit however torch fills its buckets, which changes when a process begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

VIEW_ELEMENTS_MAX = 1 << 16
"""Of one view, whose norm is summed up in single precision: over 25 million elements the error of
the square is 0.3 %, over so few 3e-7. Views are added up in double precision."""

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one parameter: its first view, the number of views, its first element, its group."""

    view: int
    views_count: int
    element: int
    group: int


class GradientLayout:
    """Places of all parameters that ``optimizers`` step and whose gradients are summed up.

    ``key`` changes when parameters were added to a group.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Iterable[torch.Tensor]) -> None:
        self.key = layout_key(optimizers)
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        reduced = {id(parameter) for parameter in parameters}
        self._places: dict[int, _Place] = {}
        self._ranges: list[tuple[int, int]] = []
        view = element = 0
        for number, group in enumerate(self.groups):
            begin = view
            for parameter in group["params"]:
                if id(parameter) in reduced and id(parameter) not in self._places:
                    count = -(-parameter.numel() // VIEW_ELEMENTS_MAX)
                    self._places[id(parameter)] = _Place(view, count, element, number)
                    view += count
                    element += parameter.numel()
            self._ranges.append((begin, view))
        self.views_count = view
        self.elements_count = element

    @property
    def groups_count(self) -> int:
        """How many groups all optimizers have together."""
        return len(self.groups)

    def place(self, parameter: torch.Tensor) -> _Place | None:
        """Return where a parameter is; None: no optimizer steps it."""
        return self._places.get(id(parameter))

    def sums(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the squares of ``norms``, a vector over views, summed up for each group."""
        squares = norms.square()
        return torch.stack([squares[begin:end].sum() for begin, end in self._ranges])


def layout_key(optimizers: Sequence[Optimizer]) -> tuple[int, ...]:
    """Return how many parameters each group has."""
    return tuple(
        len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
    )


class BucketViews:
    """The views of one bucket: of its gradients, and of what is kept for each parameter.

    ``buffer`` is all of its memory, which is held so that no other bucket gets it unnoticed.
    """

    def __init__(
        self, layout: GradientLayout, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.buffer = buffer
        self.layout = layout
        self._placed: list[tuple[torch.Tensor, _Place]] = []
        at, flat = 0, buffer.view(-1)
        views: list[torch.Tensor] = []
        for parameter in parameters:
            place, end = layout.place(parameter), at + parameter.numel()
            if place is not None:
                self._placed.append((parameter, place))
                views += views_of(flat[at:end])
            at = end
        assert at == buffer.numel(), "a bucket is its gradients, one after the other"
        self.gradients = views
        self._positions = torch.tensor(
            [p.view + number for _, p in self._placed for number in range(p.views_count)],
            dtype=torch.int64,
            device=buffer.device,
        )

    def of_kept(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of ``kept``, shape ``(elements,)``, that stand for the gradients."""
        return [
            view
            for parameter, place in self._placed
            for view in views_of(kept[place.element : place.element + parameter.numel()])
        ]

    def put_norms(self, tensors: Sequence[torch.Tensor], norms: torch.Tensor) -> None:
        """Write the norms of ``tensors``, which stand for the gradients, to their places."""
        if not tensors:
            return
        dtype = torch.float32 if tensors[0].dtype in _HALF else None
        found = torch._foreach_norm(list(tensors), 2, dtype)  # noqa: SLF001 - its public name
        norms.index_copy_(0, self._positions, torch.stack(found).double())

    @property
    def placed(self) -> Iterator[tuple[torch.Tensor, Mapping[str, Any]]]:
        """The parameters that are measured, in the order of the views, with their groups."""
        for parameter, place in self._placed:
            yield parameter, self.layout.groups[place.group]


def views_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a dense tensor as views, as the gradient of its parameter lies in a bucket."""
    return list(torch.split(in_memory_order(tensor), VIEW_ELEMENTS_MAX)) if tensor.numel() else []


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as they lie in memory, as gradients lie in a bucket."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((math.prod(tensor.shape),), (1,))
