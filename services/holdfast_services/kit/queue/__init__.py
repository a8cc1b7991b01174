"""The queue port: items that some worker does, one at a time each. ``open_queue(url)`` chooses.

Implementations: ``redis.RedisQueue`` (streams with a consumer group), ``sqlite.SqliteQueue`` (one
machine, what ``holdfast up`` uses), ``memory.MemoryQueue`` (tests). All pass
``tests/contract/test_queue.py``. Blocking and safe to use from several threads.

An item is a short text. The queue is a hint, never the truth: it may lose everything (``epoch``
tells) and may deliver twice; who offers offers again what is still due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ITEM_LENGTH_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An item that this worker does now, until it acknowledges, releases or stops its heartbeat.

    ``deliveries`` counts how often the item was handed out, this time included.
    """

    item: str
    token: str
    deliveries: int = 1


class Queue(Protocol):
    """Items waiting to be done.

    Raises, from every method:
        UnavailableError: the queue does not answer.
    """

    def epoch(self) -> str:
        """Return a text that changes when the queue has lost what was offered to it."""
        ...

    def offer(self, items: Sequence[str]) -> int:
        """Add items; one that waits or is being done is not added again. Return how many were."""
        ...

    def claim(self, worker: str, *, count_max: int, wait_s: float) -> Sequence[Claim]:
        """Return items for ``worker`` to do, oldest first; wait up to ``wait_s`` for the first.

        Items whose worker has been silent for longer than the queue's lease come first, with
        ``deliveries`` counted up.
        """
        ...

    def heartbeat(self, worker: str, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Say that the claims are being worked on; return those that another has taken over."""
        ...

    def acknowledge(self, claim: Claim) -> None:
        """The item is done: forget it. A claim that was taken over is left to the other."""
        ...

    def release(self, claim: Claim, *, delay_s: float) -> None:
        """Give an item back: anybody may claim it once ``delay_s`` is over."""
        ...

    def waiting_count(self) -> int:
        """Return how many items nobody does yet; for people."""
        ...

    def close(self) -> None:
        """Give connections back; claims stay until their lease is over."""
        ...


def open_queue(url: str, *, lease_s: float) -> Queue:
    """Return the queue that ``url`` names: ``redis://host:port/db``, ``sqlite:////absolute/file``.

    Args:
        url: Where it is; ``memory:`` is for tests.
        lease_s: A worker that is silent for so long has lost its claims.

    Raises:
        InvalidRequestError: a URL of another kind.
    """
    raise NotImplementedError((url, lease_s))
