"""Events as the page lists them, with what follows from them; and what is asked for. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from holdfast_services.metadata.edges.dashboard.consequences import consequence
from holdfast_services.metadata.edges.dashboard.texts import ago, clock, job_path

EVENTS_PER_PAGE = 100
SEVERITIES = ("info", "warning", "error")
SIGNS = {"info": "·", "warning": "!", "error": "✗"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One event; ``details`` are the ids that it names."""

    id: int
    at: str
    ago: str
    kind: str
    severity: str
    sign: str
    message: str
    job: str
    job_path: str
    node: str
    details: str
    consequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which events somebody wants to see: empty means any."""

    severity: str = ""
    job: str = ""
    node: str = ""
    kind: str = ""
    before: int | None = None

    @property
    def severities(self) -> tuple[str, ...]:
        """That severity and the graver ones; empty: any."""
        place = SEVERITIES.index(self.severity) if self.severity in SEVERITIES else 0
        return SEVERITIES[place:] if place else ()

    def query(self, before: int | None) -> str:
        """Return the query of a page with the same filters."""
        fields = {"severity": self.severity, "job": self.job, "node": self.node, "kind": self.kind}
        fields |= {"before": str(before)} if before is not None else {}
        return urlencode({name: value for name, value in fields.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A page of events, newest first; ``older`` is the address of the next one, empty: the last."""

    asked: Asked
    items: tuple[Item, ...]
    older: str
    severities: tuple[str, ...] = SEVERITIES


def news(asked: Asked, rows: Sequence[Mapping[Any, Any]], now_s: float) -> News:
    """Return the page of events; ``rows`` may be one more than fit."""
    shown = rows[:EVENTS_PER_PAGE]
    more = len(rows) > len(shown)
    older = f"/events?{asked.query(int(shown[-1]['id']))}" if more else ""
    return News(asked=asked, items=items(shown, now_s), older=older)


def items(rows: Sequence[Mapping[Any, Any]], now_s: float) -> tuple[Item, ...]:
    """Return events from their rows."""
    return tuple(_item(row, now_s) for row in rows)


def _item(row: Mapping[Any, Any], now_s: float) -> Item:
    severity = str(row["severity"])
    context = json.loads(row["context"])
    return Item(
        id=int(row["id"]),
        at=clock(row["at_s"]),
        ago=ago(row["at_s"], now_s),
        kind=row["kind"],
        severity=severity if severity in SIGNS else "info",
        sign=SIGNS.get(severity, SIGNS["info"]),
        message=row["message"],
        job=row["job"],
        job_path=job_path(row["job"]) if row["job"] else "",
        node=row["node"],
        details=", ".join(f"{name} {value}" for name, value in sorted(context.items())),
        consequence=consequence(row["kind"]),
    )
