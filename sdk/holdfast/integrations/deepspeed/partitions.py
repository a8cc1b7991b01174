"""Where a ZeRO optimizer keeps the master weights of each parameter: rows, cut into ranges.

Each rank has a few *rows*, the flat tensors that DeepSpeed gives to the optimizer below; in a row
lie ranges of parameters. Stages 1 and 2 lay whole parameters one behind the other and cut that into
as many rows as there are ranks; stage 3 cuts each parameter. What is told here is read from the
optimizer that DeepSpeed has made, so that no stage or degree is known elsewhere.

Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``[begin, begin + count)`` of a parameter lie in a row from ``at`` on."""

    fqn: str
    shape: tuple[int, ...]
    begin: int
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class Row:
    """A flat tensor of master weights, the group of the optimizer it is in, and what lies in it."""

    weights: torch.Tensor
    group: int
    ranges: tuple[Range, ...]


def rows_of(optimizer: Any, names: Mapping[torch.Tensor, str]) -> tuple[Row, ...]:
    """Return the rows that this rank has of a ZeRO optimizer, in its order.

    Args:
        optimizer: The optimizer of an engine with ZeRO.
        names: The name of each parameter.

    Raises:
        InvalidRequestError: parts of it are on a disk (NVMe), or it is of an unknown kind.
    """
    if hasattr(optimizer, "round_robin_bit16_groups"):
        return tuple(_rows_of_stages_1_and_2(optimizer, names))
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return tuple(_rows_of_stage_3(optimizer, names))
    raise InvalidRequestError(
        f"optimizer {type(optimizer).__name__} of DeepSpeed is not supported: Holdfast knows those "
        f"of ZeRO stages 1, 2 and 3"
    )


def own_range(parameter: Any) -> tuple[int, int]:
    """Return which elements of a parameter this rank holds with stage 3, as begin and count."""
    length = int(parameter.partition_numel())
    begin = dist.get_rank(parameter.ds_process_group) * length
    return begin, max(min(length, int(parameter.ds_numel) - begin), 0)


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter, whatever of it is here."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _rows_of_stages_1_and_2(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Row]:
    for group, weights in enumerate(optimizer.single_partition_of_fp32_groups):
        first = dist.get_rank(optimizer.real_dp_process_group[group]) * weights.numel()
        last = first + weights.numel()
        ranges = []
        for parameter, meta, begin in zip(
            optimizer.round_robin_bit16_groups[group],
            optimizer.round_robin_bit16_meta[group],
            optimizer.round_robin_bit16_offsets[group],
            strict=True,
        ):
            start, stop = max(begin, first), min(begin + meta.numel(), last)
            if start < stop:
                ranges.append(
                    Range(
                        names[parameter], tuple(meta.shape), start - begin, stop - start,
                        start - first,
                    )
                )  # fmt: skip
        yield Row(weights, group, tuple(ranges))


def _rows_of_stage_3(optimizer: Any, names: Mapping[torch.Tensor, str]) -> Iterator[Row]:
    if optimizer.swap_optimizer or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise InvalidRequestError(
            "offload to NVMe is not supported: offload to the CPU, or leave it out"
        )
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        ranges, at = [], 0
        for parameter in optimizer.fp16_groups[number]:
            begin, count = own_range(parameter)
            if count:
                ranges.append(Range(names[parameter], shape_of(parameter), begin, count, at))
            at += int(parameter.partition_numel())
        yield Row(weights, int(optimizer.sub_group_to_group_id[number]), tuple(ranges))


def is_of_each_element(row: Row, value: object) -> bool:
    """Tell whether a value of an optimizer's state has an element for each of the row's."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and math.prod(value.shape) == row.weights.numel()
    )
