"""The queue port: items that some worker does, one at a time each. ``open_queue(url)`` chooses.

Implementations: ``redis.RedisQueue`` (streams with a consumer group), ``sqlite.SqliteQueue`` (one
machine, what ``holdfast up`` uses), ``memory.MemoryQueue`` (tests). All pass
``tests/contract/test_queue.py``. Blocking and safe to use from several threads.

An item is a short text, and its own name: at most one of it is in the queue, be it *waiting*,
*delayed* or *claimed*. The queue is a hint, never the truth: it may lose everything (``epoch``
tells) and may deliver twice; who offers offers again what is still due.

Leases and delays run by the queue's own clock, the same for all who use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import InvalidRequestError

ITEM_LENGTH_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An item that one worker does now, until it acknowledges, releases or loses it to another.

    ``token`` tells this claim from every other of the same item, earlier and later ones too.
    ``deliveries`` counts how often the item was handed out since it was offered, this time
    included.
    """

    item: str
    token: str
    deliveries: int = 1


class Queue(Protocol):
    """Items waiting to be done.

    Raises, from every method:
        UnavailableError: the queue does not answer, or not in time; the call may have happened.
    """

    def epoch(self) -> str:
        """Return a text that changes when the queue may have lost what was offered to it."""
        ...

    def offer(self, items: Sequence[str]) -> int:
        """Add items at the end; return how many were.

        One that is in the queue, waiting, delayed or claimed, is not added again; once it is
        acknowledged it may be.

        Raises:
            InvalidRequestError: an item is empty or longer than ``ITEM_LENGTH_MAX``; none is added.
        """
        ...

    def claim(self, worker: str, *, count_max: int, wait_s: float) -> Sequence[Claim]:
        """Return 1 to ``count_max`` items for ``worker`` to do; empty if none came in ``wait_s``.

        First those whose worker was silent for longer than the lease, then the others in the
        order they were offered, released or became due. From now on the caller has the lease:
        until it is over nobody else gets them.

        Args:
            worker: Name for people to read; need not be unique.
            count_max: At least 1.
            wait_s: How long to wait for the first; more than it are not waited for.
        """
        ...

    def heartbeat(self, worker: str, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Begin the lease of ``claims`` anew; return those of them that are lost.

        Lost: another has taken it over, or the queue has forgotten it. What is late but was taken
        by nobody is kept. The loser should stop: its acknowledge will count for nothing.
        """
        ...

    def acknowledge(self, claim: Claim) -> None:
        """Forget the item: it is done. A lost claim changes nothing, nor does a second call."""
        ...

    def release(self, claim: Claim, *, delay_s: float) -> None:
        """Give the item back, to the end: anybody may claim it once ``delay_s`` is over.

        ``deliveries`` goes on from where it was. A lost claim changes nothing.
        """
        ...

    def waiting_count(self) -> int:
        """Return how many items no worker has claimed: waiting or delayed."""
        ...

    def items_count(self, prefix: str = "") -> int:
        """Return how many items that begin with ``prefix`` are here: waiting, delayed, claimed."""
        ...

    def close(self) -> None:
        """Give connections back; claims stay until their lease is over. Use nothing afterwards."""
        ...


def open_queue(url: str, *, lease_s: float) -> Queue:
    """Return the queue that ``url`` names: ``redis://host:port/db``, ``sqlite:////absolute/file``.

    Connects to nothing yet: a queue that is away is an error of its methods, not of this.

    Args:
        url: Where it is. ``rediss:`` is TLS; ``memory:`` is a new one within this process.
        lease_s: A worker that is silent for longer has lost its claims to whoever asks next.
            The same for all who use the queue.

    Raises:
        InvalidRequestError: a URL of another kind.
    """
    # The adapters are imported here: who uses one needs none of the others' libraries.
    kind, _, rest = url.partition(":")
    if kind in ("redis", "rediss"):
        from holdfast_services.kit.queue.redis import RedisQueue  # noqa: PLC0415

        return RedisQueue(url, lease_s=lease_s)
    if kind == "sqlite" and rest.startswith("////"):
        from holdfast_services.kit.queue.sqlite import SqliteQueue  # noqa: PLC0415

        return SqliteQueue(rest.removeprefix("///"), lease_s=lease_s)
    if url == "memory:":
        from holdfast_services.kit.queue.memory import MemoryQueue  # noqa: PLC0415

        return MemoryQueue(lease_s=lease_s)
    raise InvalidRequestError(  # the URL itself may hold a password
        f"a queue of kind {kind!r} is not supported: "
        f"use redis://host:port/db or sqlite:////absolute/file"
    )


def check_items(items: Iterable[str]) -> None:
    """Raise InvalidRequestError unless each item has 1 to ``ITEM_LENGTH_MAX`` characters."""
    for item in items:
        if not 1 <= len(item) <= ITEM_LENGTH_MAX:
            raise InvalidRequestError(
                f"a queue item has 1 to {ITEM_LENGTH_MAX} characters, not {len(item)}"
            )
