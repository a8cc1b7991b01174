"""A queue within one process, for tests: it forgets when the process ends."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_services.kit.queue import Claim, check_items

POLL_S = 0.02


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One item. ``due_s``: from then on anybody may claim it. ``token``: that of its claim."""

    turn: int
    due_s: float
    token: str | None = None
    deliveries: int = 0


class MemoryQueue:
    """The promises of ``Queue``, by a clock that a test may own.

    Args:
        lease_s: As in ``open_queue``.
        clock: Seconds; leases and delays run by it. Waiting runs by real time.
    """

    def __init__(self, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._changed = threading.Condition()
        self._turns = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Lose everything, as a server does that is restarted empty."""
        with self._changed:
            self._entries: dict[str, _Entry] = {}
            self._epoch = secrets.token_hex(8)

    def epoch(self) -> str:
        """As in ``Queue``."""
        return self._epoch

    def offer(self, items: Sequence[str]) -> int:
        """As in ``Queue``."""
        check_items(items)
        with self._changed:
            new = [item for item in dict.fromkeys(items) if item not in self._entries]
            for item in new:
                self._entries[item] = _Entry(turn=next(self._turns), due_s=self._clock())
            self._changed.notify_all()
        return len(new)

    def claim(self, worker: str, *, count_max: int, wait_s: float) -> Sequence[Claim]:
        """As in ``Queue``."""
        del worker
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                claims = list(itertools.islice(self._take(), count_max))
                left_s = deadline_s - time.monotonic()
                if claims or left_s <= 0:
                    return claims
                self._changed.wait(min(left_s, POLL_S))

    def heartbeat(self, worker: str, claims: Sequence[Claim]) -> Sequence[Claim]:
        """As in ``Queue``."""
        del worker
        lost = []
        with self._changed:
            for claim in claims:
                entry = self._claimed(claim)
                if entry is None:
                    lost.append(claim)
                else:
                    entry.due_s = self._clock() + self._lease_s
        return lost

    def acknowledge(self, claim: Claim) -> None:
        """As in ``Queue``."""
        with self._changed:
            if self._claimed(claim) is not None:
                del self._entries[claim.item]

    def release(self, claim: Claim, *, delay_s: float) -> None:
        """As in ``Queue``."""
        with self._changed:
            entry = self._claimed(claim)
            if entry is not None:
                entry.turn, entry.token = next(self._turns), None
                entry.due_s = self._clock() + delay_s
                self._changed.notify_all()

    def waiting_count(self) -> int:
        """As in ``Queue``."""
        with self._changed:
            return sum(entry.token is None for entry in self._entries.values())

    def items_count(self, prefix: str = "") -> int:
        """As in ``Queue``."""
        with self._changed:
            return sum(item.startswith(prefix) for item in self._entries)

    def close(self) -> None:
        """As in ``Queue``; the items stay with this object."""

    def _take(self) -> Iterator[Claim]:
        """Claim what is due, one at each step; those of silent workers first."""
        now_s = self._clock()
        due = [(name, entry) for name, entry in self._entries.items() if entry.due_s <= now_s]
        for item, entry in sorted(due, key=lambda pair: (pair[1].token is None, pair[1].turn)):
            entry.token = secrets.token_hex(8)
            entry.due_s = now_s + self._lease_s
            entry.deliveries += 1
            yield Claim(item=item, token=entry.token, deliveries=entry.deliveries)

    def _claimed(self, claim: Claim) -> _Entry | None:
        entry = self._entries.get(claim.item)
        return entry if entry is not None and entry.token == claim.token else None
