"""Where a job's time went, as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_services.metadata.domain.accounting import shown
from holdfast_services.metadata.domain.ledger import Cause, Month, total
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.domain.node_view import World
from holdfast_services.metadata.edges.dashboard.texts import lasted

MONTHS_SHOWN_MAX = 6
NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentRow:
    """One month, or all of them, in words."""

    month: str
    share: str
    productive: str
    stalled: str
    lost: str
    down: str


def spent(run: Run, world: World) -> tuple[SpentRow, ...]:
    """Return the newest months, the newest first, and all together; empty: it never trained."""
    months = shown(run, world.now_s).months
    if not months:
        return ()
    newest = [_row(month.name, month) for month in months[: -MONTHS_SHOWN_MAX - 1 : -1]]
    return (*newest, _row("all", total(months)))


def _row(name: str, month: Month) -> SpentRow:
    share = month.productive_share
    return SpentRow(
        month=name,
        share=NOTHING if share is None else f"{share * 100:.1f} %",
        productive=_time(month.productive_s),
        stalled=_time(month.stalled_s),
        lost=_by_cause(month.lost_s),
        down=_by_cause(month.down_s),
    )


def _by_cause(parts: Mapping[Cause, float]) -> str:
    causes = [f"{lasted(seconds)} ({cause})" for cause, seconds in sorted(parts.items())]
    return ", ".join(causes) or NOTHING


def _time(seconds: float) -> str:
    return lasted(seconds) if seconds else NOTHING
