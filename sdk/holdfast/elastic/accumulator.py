"""Sums over ranks and restarts: of losses, of samples seen, of right answers.

Each rank adds to its own; nothing is sent until somebody asks. What ranks have not told each other
yet is saved with each, and falls to the ranks there are after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import InvalidRequestError, PreconditionError

NAMES_BYTES_MAX = 1 << 20
"""Of what one rank tells the others at a time."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """What ``accumulator[name]`` is outside of ``synchronized``: to be added to, not a value."""

    name: str
    added: Any = 0.0

    def __add__(self, other: Any) -> _Sum:
        return _Sum(self.name, self.added + _number(self.name, other))

    def __sub__(self, other: Any) -> _Sum:
        return _Sum(self.name, self.added - _number(self.name, other))


class Accumulator:
    """Numbers by name that ranks add to, each its own part.

    ``accumulator["loss"] += value`` adds; ``with accumulator.synchronized():`` all ranks know the
    sums, and may read them. Put it into the state of a Checkpointer: after a restart, on whatever
    number of ranks, the sums are what they would have been. A tensor of one element is added on its
    device, and not waited for. No ``Mapping``: what looks through mappings may not read it.

    Args:
        group: Ranks that share the sums; None: all.
    """

    def __init__(self, *, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._total: dict[str, float] = {}
        self._own: dict[str, Any] = {}
        self._readable = False

    @contextmanager
    def synchronized(self) -> Iterator[Mapping[str, float]]:
        """Let all ranks read the sums inside; collective: enter it on all of them.

        Raises:
            InvalidRequestError: there are too many names.
        """
        for own in _of_all_ranks(self._taken(), self._group):
            for name, value in own.items():
                self._total[name] = self._total.get(name, 0.0) + value
        self._own.clear()
        self._readable = True
        try:
            yield dict(self._total)
        finally:
            self._readable = False

    def subtract(self, other: Mapping[str, Any] = {}, /, **more: Any) -> None:
        """Take away the values of ``other`` by name."""
        for name, value in {**other, **more}.items():
            self[name] -= value

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Add the values of ``other`` by name, as ``Counter`` does."""
        for name, value in {**dict(other), **more}.items():
            self[name] += value

    def clear(self) -> None:
        """Begin anew; call it on all ranks alike."""
        self._total.clear()
        self._own.clear()

    def __getitem__(self, name: str) -> Any:
        if not self._readable:
            return _Sum(name)
        return self._total[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if self._readable:
            raise PreconditionError(
                f"accumulator[{name!r}] cannot be changed inside synchronized(): each rank would "
                f"add it; do so outside"
            )
        if not (isinstance(value, _Sum) and value.name == name):
            raise InvalidRequestError(
                f"accumulator[{name!r}] = {value!r} sets no sum of all ranks: use += or -="
            )
        self._own[name] = self._own.get(name, 0.0) + value.added

    def __delitem__(self, name: str) -> None:
        if not self._readable:
            raise PreconditionError("delete names inside synchronized(), on all ranks alike")
        del self._total[name]

    def __iter__(self) -> Iterator[str]:
        self._require_readable()
        return iter(self._total)

    def __len__(self) -> int:
        self._require_readable()
        return len(self._total)

    def __contains__(self, name: object) -> bool:
        self._require_readable()
        return name in self._total

    def keys(self) -> list[str]:
        """Return the names, inside ``synchronized``."""
        return list(self)

    def items(self) -> list[tuple[str, float]]:
        """Return names and sums, inside ``synchronized``."""
        return [(name, self._total[name]) for name in self]

    def _require_readable(self) -> None:
        if not self._readable:
            raise PreconditionError(
                "an accumulator can only be read inside `with accumulator.synchronized():`, where "
                "the ranks have told each other what they added"
            )

    def _taken(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._own.items()}

    def state_dict(self) -> dict[str, object]:
        """Return the sums that all know, and what this rank has added since."""
        return {"total": dict(self._total), "own": self._taken()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank had saved."""
        self.load_parts(state, [state])

    def load_parts(self, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what other ranks had saved; this one takes over what ``parts`` had added."""
        self._total = {name: float(value) for name, value in state["total"].items()}
        self._own = {}
        for part in parts:
            for name, value in part["own"].items():
                self._own[name] = self._own.get(name, 0.0) + float(value)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise InvalidRequestError(
                f"accumulator[{name!r}]: a tensor of {tuple(value.shape)} is no number: sum it up"
            )
        return value.detach().reshape(()).double()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"accumulator[{name!r}]: {value!r} is no number")
    return float(value)


def _of_all_ranks(own: dict[str, float], group: dist.ProcessGroup | None) -> list[dict[str, float]]:
    """Return what each rank gave, in the order of ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return [own]
    text = json.dumps(own).encode()
    if len(text) > NAMES_BYTES_MAX:
        raise InvalidRequestError(
            f"an accumulator of {len(own)} names is {len(text)} bytes, at most {NAMES_BYTES_MAX}"
        )
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    ranks = dist.get_world_size(group)
    lengths = _gathered(torch.tensor([len(text)], device=device), ranks, group)
    each = [int(length) for length in lengths]
    padded = torch.frombuffer(bytearray(text.ljust(max(each))), dtype=torch.uint8).to(device)
    rows = _gathered(padded, ranks, group)
    return [
        _parsed(row.cpu().numpy().tobytes()[:length])
        for row, length in zip(rows, each, strict=True)
    ]


def _gathered(own: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own, group=group)
    return gathered


def _parsed(text: bytes) -> dict[str, float]:
    """Return what a rank told; ``json`` reads NaN and infinities, which a loss may be."""
    held = json.loads(text)
    assert isinstance(held, dict), "ranks of one job run one code"
    return {str(name): float(value) for name, value in held.items()}
