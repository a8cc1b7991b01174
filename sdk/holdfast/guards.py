"""What becomes of a save that has a NaN or an infinity in it; a value for ``Checkpointer(guard=)``.

Names are those of tensors in a checkpoint, as ``holdfast show`` and events tell them, such as
``model.0.weight``; patterns are those of a shell, ``*`` also over dots.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Rational, Real
from pathlib import Path

from holdfast.errors import InvalidRequestError

PATTERNS_COUNT_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseNonFinite:
    """Do not save a step whose floating-point tensors are not all finite; training goes on.

    Each rank looks at the bytes that it has copied, behind training's back. What one rank refuses
    is no checkpoint of the job: no rank's part of it is kept.

    Args:
        exclude: Patterns of names of tensors that may hold infinities and NaN, such as masks.
        notes: Names of numbers in the notes of a save that must be finite too.
        stop_after: After so many refusals in a row ``step`` raises ``NonFiniteError``; 0: never.
        keep: A folder, as each rank sees it: of the first of refusals in a row a rank that refuses
            writes its part there, as a file to look at. No restore reads it. None: nothing is kept.
    """

    exclude: tuple[str, ...] = ()
    notes: tuple[str, ...] = ("loss",)
    stop_after: int = 0
    keep: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("exclude", "notes"):
            _check_names(name, getattr(self, name))
        count = self.stop_after
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InvalidRequestError(
                f"RefuseNonFinite: stop_after must be a whole number from 0, not {count!r}"
            )
        path = self.keep
        if path is not None and not (path and isinstance(path, str | os.PathLike)):
            raise InvalidRequestError(
                f"RefuseNonFinite: keep must be the path of a folder, not {path!r}"
            )

    def kept_in(self, job: str) -> Path | None:
        """Return the folder for refused parts of a job, whose name was checked; None: not kept."""
        return Path(self.keep).absolute() / job if self.keep is not None else None

    def excludes(self, name: str) -> bool:
        """Tell whether the tensor of this name may hold anything."""
        return any(name == one or fnmatchcase(name, one) for one in self.exclude)

    def bad_notes(self, notes: Mapping[str, object] | None) -> tuple[str, ...]:
        """Return which of the numbers that must be finite are not."""
        named = ((name, notes.get(name)) for name in self.notes) if notes else ()
        return tuple(name for name, value in named if not _is_finite(value))


def checked_guard(guard: RefuseNonFinite | None) -> RefuseNonFinite | None:
    """Return ``guard``; None: nothing is looked at.

    Raises:
        InvalidRequestError: it is none.
    """
    if guard is not None and not isinstance(guard, RefuseNonFinite):
        raise InvalidRequestError(
            f"guard={guard!r} is no guard: pass one, such as holdfast.RefuseNonFinite()"
        )
    return guard


def _check_names(what: str, names: Iterable[object]) -> None:
    plain = isinstance(names, tuple) and len(names) <= PATTERNS_COUNT_MAX
    if not plain or not all(isinstance(name, str) and name for name in names):
        raise InvalidRequestError(
            f"RefuseNonFinite: {what} must be a tuple of at most {PATTERNS_COUNT_MAX} names, such "
            f'as ("*.mask",), not {names!r}'
        )


def _is_finite(value: object) -> bool:
    """Tell whether a note is a finite number, or none that could be otherwise.

    Tensors are not asked, as notes cannot have them: on a GPU that would wait for the device.
    """
    if isinstance(value, Rational) or not isinstance(value, Real):
        return True
    return math.isfinite(float(value))
