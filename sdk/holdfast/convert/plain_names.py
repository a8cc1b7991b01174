"""The tensors of a checkpoint by the names that the state has for them, each of them once.

What lies on a part of the ranks is saved by each group of ranks that has it, as
``rank.<first rank>.<name>``. Whether the groups have the same tensor, such as a LayerNorm beside
the plan of tensor parallelism, or stages of a model by hand, each with its own, only the bits tell.
Pieces or tensors of several groups are never mixed: the same bits become one tensor, others are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.convert.source import TensorSource
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.format.names import own_rank, unranked
from holdfast.format.segment import TensorSpec

_OF_RANKS = "holdfast."
_GROUPS_SHOWN_MAX = 3


def of_groups(names: Iterable[str]) -> list[str]:
    """Return the names of tensors that a group of ranks has saved as its own.

    >>> of_groups(["model.up", "rank.0.model.norm", "rank.0.holdfast.rng.torch"])
    ['rank.0.model.norm']
    """
    return [
        name
        for name in names
        if unranked(name) != name and not unranked(name).startswith(_OF_RANKS)
    ]


class PlainNames:
    """A source whose tensors have the names of the state.

    Those that several groups have saved come first, so that a difference is found before much has
    been written. Memory is that of two tensors. Random streams of ranks are left out.

    Args:
        source: A checkpoint; it stays the caller's.
        rank: Take what the group that begins with this rank has saved, and what all ranks have
            together; None: of all groups.

    Raises:
        NotFoundError: no group begins with ``rank``; names those that there are.
    """

    def __init__(self, source: TensorSource, rank: int | None = None) -> None:
        self._source = source
        self._specs = {spec.fqn: spec for spec in source.specs()}
        self._stored: dict[str, list[str]] = {}
        if rank is not None:
            _check_rank(self._specs, rank)
        for stored in self._specs:
            name = unranked(stored)
            mine = rank is None or own_rank(stored) in (None, rank)
            if mine and not name.startswith(_OF_RANKS):
                self._stored.setdefault(name, []).append(stored)

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors; see the class for their order."""
        names = sorted(self._stored, key=lambda name: len(self._stored[name]) == 1)
        return [self._specs[self._stored[name][0]]._replace(fqn=name) for name in names]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors.

        Raises:
            InvalidRequestError: groups have saved different tensors under one of these names.
        """
        stored = [one for name in names for one in self._stored[name]]
        found = self._source.tensors(stored)
        for name in names:
            _, tensor = next(found)
            for _ in self._stored[name][1:]:
                _, other = next(found)
                if not _is_same(tensor, other):
                    raise _different(name, self._stored[name])
                del other
            yield name, tensor

    def state(self) -> Mapping[int, Any]:
        """Return nothing: what each rank says of itself goes with its own names."""
        return {}

    def values(self) -> Mapping[str, Any]:
        """Return what the source has."""
        return self._source.values()


def is_of_one_process(source: TensorSource) -> bool:
    """Tell whether a single process has saved all of it: no name has to say whose a tensor is."""
    owners = {own_rank(spec.fqn) for spec in source.specs()}
    return owners <= {None, 0} and set(source.state()) <= {0}


class OneProcess:
    """The source of a single process: its tensors have the names of the state.

    So have the references in what the process says of itself, which comes along. Random streams
    keep their stored names.

    Args:
        source: A checkpoint that ``is_of_one_process``; it stays the caller's.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        specs = source.specs()
        own = set(of_groups(spec.fqn for spec in specs))
        plain = {fqn: unranked(fqn) if fqn in own else fqn for fqn in (s.fqn for s in specs)}
        self._specs = [spec._replace(fqn=plain[spec.fqn]) for spec in specs]
        self._stored = {name: fqn for fqn, name in plain.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """Return all tensors, in the order of the source."""
        return self._specs

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors."""
        found = self._source.tensors([self._stored[name] for name in names])
        for name, (_, tensor) in zip(names, found, strict=True):
            yield name, tensor

    def state(self) -> Mapping[int, Any]:
        """Return what the source has."""
        return self._source.state()

    def values(self) -> Mapping[str, Any]:
        """Return what the source has."""
        return self._source.values()


def _check_rank(stored: Iterable[str], rank: int) -> None:
    firsts = {own_rank(name) for name in of_groups(stored)}
    if rank not in firsts:
        there = ", ".join(str(first) for first in sorted(firsts, key=str)) or "none"
        raise NotFoundError(
            f"no group of ranks that begins with rank {rank} has saved tensors of its own; groups "
            f"that have begin with: {there}"
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def _different(name: str, stored: Sequence[str]) -> InvalidRequestError:
    firsts = [own_rank(one) for one in stored]
    first = next(rank for rank in firsts if rank is not None)
    groups = ", ".join("all ranks" if rank is None else f"rank {rank}" for rank in firsts)
    shown = ", ".join(stored[:_GROUPS_SHOWN_MAX])
    return InvalidRequestError(
        f"groups of ranks have saved different tensors as {name!r} (the groups that begin with "
        f"{groups}): take those of one group, for example --rank {first}, or all of them under "
        f"their own names ({shown}) without --only, --strip and --rank",
        key=name,
    )
