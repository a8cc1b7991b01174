"""Where in a script a checkpoint was taken: in which pass over which data loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import ManifestError

KEY = "place"
"""Of the state: where the newest save was taken."""


@dataclass(frozen=True, slots=True)
class PassPlace:
    """A place inside pass ``count`` (from 1) over loader ``number`` (from 0), in building order.

    ``given``: batches that the pass had given; ``counted``: what counts them from outside counts
    each, so it is to be moved on. ``loads``: how often the script had called
    ``torch.load`` before its first pass; ``loaded``: a digest of the files. ``ranks``: how many
    there were.
    """

    number: int
    count: int
    given: int
    counted: bool = False
    loads: int = 0
    loaded: str = ""
    ranks: int = 1

    def __str__(self) -> str:
        return f"in pass {self.count} over loader_{self.number + 1}"

    def is_in(self, number: int, count: int) -> bool:
        """Tell whether the state is to be loaded before the first batch of this pass."""
        return (number, count) == (self.number, self.count)

    def value(self) -> dict[str, object]:
        """Return it as plain data of a state."""
        return asdict(self)

    @classmethod
    def of(cls, value: object) -> PassPlace:
        """Return the place that ``value`` is.

        Raises:
            ManifestError: it is none.
        """
        if isinstance(value, Mapping):
            found: list[Any] = [value.get(name) for name in cls.__slots__]
            if [type(one) for one in found] == [int, int, int, bool, int, str, int]:
                return cls(*found)
        raise ManifestError(f"{KEY} is no place in a script: {value!r}")
