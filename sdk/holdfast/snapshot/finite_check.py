"""Looks for NaN and infinities in what was copied into a slot, a span of one dtype at a time.

``torch.aminmax`` reads each byte once and makes nothing of its size; a NaN passes through it. It
runs at some times the pace of the copy, after the gate has opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from holdfast.format.names import unranked
from holdfast.format.segment import ITEM_BYTES, TensorEntry
from holdfast.reading.dtypes import TORCH
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.plan import SavePlan

SPAN_BYTES_MAX = 4 << 20
"""Looked at by one call: between two of them the interpreter's lock may change hands."""
NAMES_COUNT_MAX = 8
"""How many tensors are told by name."""

_FLOATS = ("F64", "F32", "F16", "BF16", "C64")
# Byte by byte: of these digits all that are at least the limit are none, or infinite.
_BYTE_LIMITS = {"F8_E5M2": (0x7F, 0x7C), "F8_E4M3": (0x7F, 0x7F), "F8_E8M0": (0xFF, 0xFF)}


class _Span(NamedTuple):
    """Bytes ``[begin, end)`` of a segment that are elements of one dtype."""

    dtype: str
    begin: int
    end: int


class FiniteCheck:
    """Looks at the segments of a plan; what ``excludes`` names is passed over."""

    def __init__(self, excludes: Callable[[str], bool]) -> None:
        self._excludes = excludes
        self._of: SavePlan | None = None
        self._entries: list[TensorEntry] = []
        self._spans: list[_Span] = []

    def non_finite(self, plan: SavePlan, buffer: SlotBuffer) -> tuple[str, ...]:
        """Return the names of tensors in ``buffer`` that are not finite, at most a few; sorted.

        Raises:
            PreconditionError: the slot is not being written any more.
        """
        if self._of is not plan:
            self._entries = [e for e in plan.template.entries if self._is_looked_at(e)]
            self._spans = list(_spans(self._entries))
            self._of = plan
        bad = [span for span in self._spans if not _is_finite(span, buffer)]
        return tuple(sorted(self._named(bad, buffer)))

    def _is_looked_at(self, entry: TensorEntry) -> bool:
        known = entry.spec.dtype in _FLOATS or entry.spec.dtype in _BYTE_LIMITS
        return known and entry.begin < entry.end and not self._excludes(unranked(entry.spec.fqn))

    def _named(self, bad: Sequence[_Span], buffer: SlotBuffer) -> Iterator[str]:
        """Yield what lies in the spans and is not finite itself."""
        count = 0
        for entry in self._entries if bad else ():
            if not any(entry.begin < span.end and span.begin < entry.end for span in bad):
                continue
            pieces = _cut(_Span(entry.spec.dtype, entry.begin, entry.end))
            if all(_is_finite(piece, buffer) for piece in pieces):
                continue
            yield unranked(entry.spec.fqn)
            count += 1
            if count == NAMES_COUNT_MAX:
                return


def _spans(entries: Sequence[TensorEntry]) -> Iterator[_Span]:
    """Yield what the entries cover: neighbours of one dtype together, and no span too long."""
    ordered = sorted(entries, key=lambda entry: entry.begin)
    for dtype, group in groupby(ordered, key=lambda entry: entry.spec.dtype):
        begin = end = -1
        for entry in group:
            if entry.begin != end:
                yield from _cut(_Span(dtype, begin, end))
                begin = entry.begin
            end = entry.end
        yield from _cut(_Span(dtype, begin, end))


def _cut(span: _Span) -> Iterator[_Span]:
    assert SPAN_BYTES_MAX % ITEM_BYTES[span.dtype] == 0
    for begin in range(span.begin, span.end, SPAN_BYTES_MAX):
        yield _Span(span.dtype, begin, min(begin + SPAN_BYTES_MAX, span.end))


def _is_finite(span: _Span, buffer: SlotBuffer) -> bool:
    data = buffer.between(span.begin, span.end)
    if span.dtype in _BYTE_LIMITS:
        mask, limit = _BYTE_LIMITS[span.dtype]
        return int((data & mask).max()) < limit
    numbers = data.view(torch.float32 if span.dtype == "C64" else TORCH[span.dtype])
    least, most = torch.aminmax(numbers)
    return bool(torch.isfinite(least) & torch.isfinite(most))
