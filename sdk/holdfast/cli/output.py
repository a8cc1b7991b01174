"""What a command has to say, and how it is printed: tables for people, JSON for machines.

Commands return a ``Report`` and print nothing. Rich draws on a terminal when it is installed;
everywhere else tables are plain aligned columns, which other tools can read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from holdfast.core.text import shown
from holdfast.errors import InvalidRequestError

SHOW_PROGRESS_AFTER_S = 1.0

Json = dict[str, Any] | list[Any] | str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under named columns; every row has as many cells as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a command: ``data`` for machines, ``text`` for people; same facts."""

    data: Json
    text: Sequence[str | Table]
    failed: bool = False


def counted(count: int, what: str) -> str:
    """Return a number of things.

    >>> counted(1, "checkpoint"), counted(2, "checkpoint")
    ('1 checkpoint', '2 checkpoints')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def confirm(question: str, refusal: str) -> None:
    """Ask on a terminal; return if the answer is yes.

    Raises:
        InvalidRequestError: it is not, or there is no terminal (``refusal`` says what to do).
    """
    if not sys.stdin.isatty():
        raise InvalidRequestError(refusal)
    print(f"{question} yes/no ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InvalidRequestError("nothing was stopped or removed")


def print_report(report: Report, *, as_json: bool, out: TextIO) -> None:
    """Print ``report`` to ``out``."""
    if as_json:
        print(json.dumps(report.data, indent=2), file=out)
        return
    for block in report.text:
        if isinstance(block, str):
            print(shown(block, keeps="\n\t"), file=out)
        elif not (out.isatty() and _draw(block, out)):
            print(plain(block), file=out)


def plain(table: Table) -> str:
    """Return ``table`` as aligned columns, two spaces apart, without trailing blanks.

    >>> print(plain(Table(("job", "step"), (("gpt", "12"),))))
    job  step
    gpt  12
    """
    lines = (table.columns, *(tuple(map(shown, row)) for row in table.rows))
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def drawn(table: Table) -> Any:
    """Return ``table`` as one of rich's.

    Raises:
        ImportError: rich is not installed.
    """
    from rich import box  # noqa: PLC0415 - only for a terminal
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = RichTable(*table.columns, box=box.SIMPLE_HEAD)
    for row in table.rows:
        made.add_row(*(Text(shown(cell)) for cell in row))
    return made


def _draw(table: Table, out: TextIO) -> bool:
    """Draw with rich; False when it is not installed."""
    try:
        from rich.console import Console  # noqa: PLC0415 - only for a terminal
    except ImportError:
        return False
    Console(file=out).print(drawn(table))
    return True


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that ``what`` goes on, on a terminal; for what takes more than a second."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console  # noqa: PLC0415 - only for a terminal
    except ImportError:
        yield
        return
    with Console(stderr=True).status(what):
        yield


@contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes just done; draws with rich, only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _bytes: None
        return
    try:
        from rich.console import Console  # noqa: PLC0415 - only for a terminal
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield lambda _bytes: None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    begin_s = time.monotonic()
    drawn = Progress(*columns, console=Console(stderr=True), transient=True)
    task = drawn.add_task(what, total=total_bytes)

    def advance(length_bytes: int) -> None:
        drawn.advance(task, length_bytes)
        if not drawn.live.is_started and time.monotonic() - begin_s >= SHOW_PROGRESS_AFTER_S:
            drawn.start()

    try:
        yield advance
    finally:
        drawn.stop()


@contextmanager
def progress(what: str, total_count: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of ``total_count`` pieces; draws only on a terminal.

    The bar appears with the first piece that is done after ``SHOW_PROGRESS_AFTER_S``.
    """
    begin_s = time.monotonic()
    done_count = 0
    shown = False

    def advance() -> None:
        nonlocal done_count, shown
        done_count += 1
        if sys.stderr.isatty() and time.monotonic() - begin_s >= SHOW_PROGRESS_AFTER_S:
            shown = True
            filled = 30 * done_count // max(total_count, 1)
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r{what} [{bar}] {done_count}/{total_count}", end="", file=sys.stderr)

    try:
        yield advance
    finally:
        if shown:
            print(file=sys.stderr)
