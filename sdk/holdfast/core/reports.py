"""What a rank says of itself.

A ``RankReport`` is one value from the training script to the catalogue: the rank makes it, its
agent passes it on as it came. Each process that receives one from another takes it through
``checked`` once. A new field stands in ``proto/holdfast/v1/common.proto``, here, and in the rule
that uses it; nobody between copies fields.

Units: bytes, seconds; ``step`` counts optimizer steps completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from holdfast.core import hints as job_hints
from holdfast.core.announcements import SaveReason
from holdfast.core.hints import JobHints
from holdfast.core.ids import STEP_MAX
from holdfast.core.text import holds_nul, tellable
from holdfast.errors import InvalidRequestError

SECONDS_MIN = 1e-9
"""A measured time below it is taken as not known: nothing that is measured here is so short."""
SECONDS_MAX = 1e9
BYTES_MAX = 1 << 42
"""Of one rank's segment, so that the sum over the largest world still is a 63-bit number."""
SAVING_COUNT_MAX = 1024
NOTE_BYTES_MAX = 4 << 10
"""Longest text of one note."""
WHY_LENGTH_MAX = 500
"""Characters of a reason; one that is longer is cut."""
NOTES_COUNT_MAX = 4
"""How many notes a rank repeats: those of saves that may not be committed yet."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """The user's metadata of one step: a JSON object as text."""

    step: int
    json: str


def _cost(about: str, over: Callable[[Iterable[Any]], Any], unknown: float) -> Any:
    return field(default=unknown, metadata={"about": about, "over": over})


def _slowest_s(about: str) -> Any:
    """A time; that of an attempt is the time of its slowest rank."""
    return _cost(about, max, 0.0)


def _all_bytes(about: str) -> Any:
    """An amount; that of an attempt is the sum over its ranks."""
    return _cost(about, sum, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """What saves and the restore have cost one rank, as last measured; 0: not known.

    Each field says what it is about and how the ranks of an attempt make one figure of it;
    ``/metrics`` and REST show what stands here.
    """

    stall_s: float = _slowest_s("Time that training waited for the last save")
    copy_s: float = _slowest_s("Time to copy the state of the last save")
    save_bytes: int = _all_bytes("Size of the last save")
    decide_s: float = _slowest_s("Time of the restore until the checkpoint was chosen")
    fetch_s: float = _slowest_s("Time of the restore to fetch and verify all bytes")
    load_s: float = _slowest_s("Time of the restore to load the tensors")
    restored_bytes: int = _all_bytes("Size of the segments that the restore loaded")
    stalled_s: float = _slowest_s("Time that training waited for all saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank says of itself, a level: the newest counts, repeats are harmless.

    ``interval_reason`` says whose ``save_interval_s`` it is, and ``interval_why`` how it came about
    if that was reckoned. ``closed``: the script has ended its saves in order. ``wants_save`` is
    why the rank asks for a save now, UNSPECIFIED: it does not. ``saving`` are steps begun, neither
    sealed nor given up: with ``step`` beyond one that is neither there nor among the shards, that
    one will never be whole. Nor will it with ``sealed_before`` beyond it: one more than the newest
    step of which the rank has heard that its segment is sealed, 0: of none. ``notes`` are those of
    rank 0 only, and so are ``hints``.
    """

    step: int = 0
    step_s: float = 0.0
    save_interval_s: float = 0.0
    interval_reason: SaveReason = SaveReason.UNSPECIFIED
    wants_save: SaveReason = SaveReason.UNSPECIFIED
    loaded: bool = False
    saving: tuple[int, ...] = ()
    notes: tuple[StepNote, ...] = ()
    costs: RankCosts = field(default_factory=RankCosts)
    hints: JobHints | None = None
    sealed_before: int = 0
    interval_why: str = ""
    closed: bool = False

    def after(self, before: RankReport) -> RankReport:
        """Return this report as the one that follows ``before``: what is done stays done."""
        return replace(
            self,
            step=max(self.step, before.step),
            sealed_before=max(self.sealed_before, before.sealed_before),
            loaded=self.loaded or before.loaded,
        )

    def lasting(self) -> tuple[object, ...]:
        """Return the values of all fields but those that change with every training step."""
        return _lasting(self)


_PASSING = frozenset({"step", "step_s", "saving", "notes", "costs", "hints", "sealed_before"})
_lasting = attrgetter(*(spec.name for spec in fields(RankReport) if spec.name not in _PASSING))


def checked(report: RankReport) -> RankReport:
    """Return a peer's report with numbers that every rule can reckon with.

    A measured time that is no time (NaN, infinite, negative, below ``SECONDS_MIN``) is taken as
    not known, and so is an amount that no segment has: a bad clock must not end the training.
    Notes that nobody could keep are left out: they never cost a save. Of hints that no job can have
    the reason is kept.

    Raises:
        InvalidRequestError: a step that is none, or more steps than a rank can have begun.
    """
    for step in (report.step, *report.saving):
        if not 0 <= step <= STEP_MAX:
            raise InvalidRequestError(f"report: step {step} is not within 0..{STEP_MAX}")
    if not 0 <= report.sealed_before <= STEP_MAX + 1:
        raise InvalidRequestError(f"report: no step is before {report.sealed_before}")
    if len(report.saving) > SAVING_COUNT_MAX:
        raise InvalidRequestError(
            f"report: {len(report.saving)} steps begun to save, at most {SAVING_COUNT_MAX}"
        )
    notes = tuple(note for note in report.notes if _keepable(note))[-NOTES_COUNT_MAX:]
    hints = report.hints and job_hints.checked(report.hints)
    measured = _measured(report)
    return replace(
        measured,
        notes=notes,
        costs=_measured(report.costs),
        hints=hints,
        interval_why=tellable(report.interval_why[:WHY_LENGTH_MAX]),
    )


def _keepable(note: StepNote) -> bool:
    fits = len(note.json.encode()) <= NOTE_BYTES_MAX
    return fits and 0 <= note.step <= STEP_MAX and not holds_nul(note.json)


def seconds(value: float) -> float:
    """Return a measured time, or 0 if no clock can have shown it."""
    return value if SECONDS_MIN <= value <= SECONDS_MAX else 0.0


def together(costs: Iterable[RankCosts]) -> RankCosts:
    """Return what the ranks of an attempt have cost: of times the longest, of bytes the sum."""
    each = tuple(costs)
    if not each:
        return RankCosts()
    return RankCosts(
        **{
            spec.name: spec.metadata["over"](getattr(one, spec.name) for one in each)
            for spec in fields(RankCosts)
        }
    )


def _measured(value: V) -> V:
    """Return ``value`` with each float a time and each amount of bytes one that can be."""
    bad: dict[str, float] = {}
    for spec in fields(value):  # type: ignore[arg-type]
        item = getattr(value, spec.name)
        if type(item) is float and seconds(item) != item:
            bad[spec.name] = 0.0
        elif spec.name.endswith("_bytes") and not 0 <= item <= BYTES_MAX:
            bad[spec.name] = 0
    return replace(value, **bad) if bad else value  # type: ignore[type-var]
