"""A list in pages: which part of it is shown, and where the others are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """What a page shows; addresses of the pages beside it, empty: there is none."""

    shown: Sequence[T]
    newer: str
    older: str
    place: str


def page_of(rows: Sequence[T], number: int, length: int, path: Callable[[int], str]) -> Page[T]:
    """Return page ``number``, from 1, of pages of this length; of those that are not, the last.

    >>> page_of("abcde", 2, 2, str)
    Page(shown='cd', newer='1', older='3', place='page 2 of 3')
    """
    pages = max(1, -(-len(rows) // length))
    page = min(number, pages)
    return Page(
        shown=rows[(page - 1) * length : page * length],
        newer=path(page - 1) if page > 1 else "",
        older=path(page + 1) if page < pages else "",
        place=f"page {page:,} of {pages:,}",
    )
