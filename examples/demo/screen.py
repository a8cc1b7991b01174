"""What people see of the demo: progress while it trains, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Self

from report import PHASES, Recovery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.core.byte_sizes import format_bytes

LINE_EVERY_STEPS = 10


class Screen:
    """A progress bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, name: str, steps: int) -> None:
        self._name = name
        self._steps = steps
        self._said = -1
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TextColumn("steps"), TimeElapsedColumn(), disable=not sys.stdout.isatty()
        )
        self._task = self._progress.add_task(name, total=steps)

    def show(self, completed: int) -> None:
        """Say how far training has got."""
        self._progress.update(self._task, completed=completed)
        if self._progress.disable and completed // LINE_EVERY_STEPS > self._said:
            self._said = completed // LINE_EVERY_STEPS
            print(f"  {self._name}: step {completed} of {self._steps}", flush=True)

    def say(self, message: str) -> None:
        """Write a line that stays."""
        self._progress.console.print(f"  {message}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def print_report(costs: Mapping[str, Sequence[Recovery]]) -> None:
    """Print one column per launcher and fault."""
    recoveries = [each for found in costs.values() for each in found]
    table = Table(title="Recovery, in seconds from the kill", title_justify="left")
    table.add_column("")
    for launcher, found in costs.items():
        for each in found:
            kind = f"{each.kind.replace('_', ' ')}, {'warm' if each.warm else 'cold'}"
            table.add_column(f"{launcher}\n{kind}", justify="right")
    table.add_row("steps lost", *(str(each.lost_steps) for each in recoveries))
    table.add_row("total", *(f"{each.recovery_s:.2f}" for each in recoveries), style="bold")
    for phase in PHASES:
        table.add_row(
            f"  {phase.replace('_', ' ')}", *(f"{each.phases[phase]:.2f}" for each in recoveries)
        )
    for tier in sorted({tier for each in recoveries for tier in each.sources}):
        read = (format_bytes(each.sources.get(tier, 0)) for each in recoveries)
        table.add_row(f"read from {tier}", *read)
    Console().print(table)
