"""The order of one fetch over one connection: what to ask, read, give back, and ask again. Pure.

A part is *asked for*, *read* in messages, then *given back*; only the answer to that says whether
its bytes may be believed. Answers come in the order of what was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

PARTS_COUNT_MAX = 4
"""Parts under way on one connection."""
MESSAGE_BYTES_MAX = 4 << 20


class Awaited(Enum):
    """What the next answer is about."""

    LENT = 1
    DONE = 2


def messages(length_bytes: int, message_bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yield ``(begin, end)`` of the READs that bring a part, in bytes."""
    step = min(MESSAGE_BYTES_MAX, message_bytes_max)
    for begin in range(0, length_bytes, step):
        yield begin, min(begin + step, length_bytes)


class Flow:
    """Where each part of a fetch is.

    Invariant: at most ``PARTS_COUNT_MAX`` are between ``ask`` and ``verified``.
    """

    def __init__(self, parts: Iterable[int]) -> None:
        self._waiting = deque(parts)
        self._awaited: deque[tuple[Awaited, int]] = deque()
        self._reading: dict[int, int] = {}
        self._mismatched: set[int] = set()

    @property
    def awaited(self) -> Awaited | None:
        """What the next answer is about; None when none is due."""
        return self._awaited[0][0] if self._awaited else None

    @property
    def all_awaited(self) -> tuple[Awaited, ...]:
        """What the answers that are due are about, in order."""
        return tuple(about for about, _ in self._awaited)

    @property
    def ended(self) -> bool:
        """Whether all parts are verified."""
        return not (self._waiting or self._awaited or self._reading)

    def ask(self) -> int | None:
        """Return the part to ask for now, None when there is none or enough are under way."""
        if not self._waiting or len(self._awaited) + len(self._reading) >= PARTS_COUNT_MAX:
            return None
        index = self._waiting.popleft()
        self._awaited.append((Awaited.LENT, index))
        return index

    def answered(self) -> int:
        """Return the part that an answer is about."""
        return self._awaited.popleft()[1]

    def read(self, index: int, count: int) -> None:
        """Note that a part comes in ``count`` messages."""
        self._reading[index] = count

    def arrived(self, index: int) -> bool:
        """Note a message; True when it was the part's last, which is to be given back now."""
        self._reading[index] -= 1
        if self._reading[index]:
            return False
        del self._reading[index]
        self._awaited.append((Awaited.DONE, index))
        return True

    def mismatched(self, index: int) -> bool:
        """Have a part that does not match come once more; False: that was the second time."""
        if index in self._mismatched:
            return False
        self._mismatched.add(index)
        self._waiting.append(index)
        return True
