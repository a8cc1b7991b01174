"""What the plainer policies choose: columns, values, and a sentence for each job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast_services.scheduler.domain.policies.shapes import Pool
from holdfast_services.scheduler.domain.policies.table import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """See ``plan.Choice``. ``says`` makes the sentence from a row and a column, -1 for none."""

    columns: list[int]
    values: Array
    says: Callable[[int, int], str]
    prices: Mapping[Pool, float] = field(default_factory=dict)

    def why(self, row: int, column: int) -> str:
        """Return in one sentence why the job of ``row`` has the shape of ``column``."""
        return self.says(row, column)
