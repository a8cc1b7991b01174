"""What of a state knows how its job scales: it is asked, and what cannot be is told nobody.

Knows the method's name and nothing of who has it: ``job_hints() -> JobHints | None``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.core.hints import JobHints, check
from holdfast.errors import InvalidRequestError
from holdfast.logs import steady_logger

DEPTH_MAX = 4

log = steady_logger(__name__)


class HintSources:
    """Those of one state; they are looked for once, when they are first asked."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._state = state
        self._asked: list[Callable[[], Any]] | None = None

    def hints(self) -> JobHints | None:
        """Return the hints of the first that has any; None: nobody knows anything."""
        if self._asked is None:
            self._asked = list(_found(self._state, DEPTH_MAX))
        for ask in self._asked:
            told = ask()
            if isinstance(told, JobHints):
                return _believed(told)
        return None


def _believed(told: JobHints) -> JobHints | None:
    try:
        check(told)
    except InvalidRequestError as error:
        log.warning("what this job knows of itself is not told to the scheduler: %s", error)
        return None
    return told


def _found(value: object, depth: int) -> Iterator[Callable[[], Any]]:
    ask = getattr(value, "job_hints", None)
    if callable(ask):
        yield ask
    elif isinstance(value, (Mapping, list, tuple)) and depth:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _found(part, depth - 1)
