"""The edge to the queue: claims items, keeps them alive, gives back what did not succeed.

An outage of queue, metadata or store is waited out with growing rests; nothing is lost by it, as
metadata offers again whatever is still due. On ``stop`` nothing more is claimed, parts in flight
end, claims are given back, and open uploads stay for whoever goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.persistence_work import SweepWork, Work
from holdfast.core.queue_items import Item, Kind, parse
from holdfast.core.retry import Waits, worth_telling
from holdfast.errors import (
    CheckpointError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    StoppedError,
)
from holdfast_services.kit.queue import Claim, Queue
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.service import PersistService

ITEMS_COUNT_MAX = 2
CLAIM_WAIT_S = 0.5
DRAIN_S_MAX = 8.0
BACKGROUND_REST_S = 5.0
ITEM_WAITS = Waits(first_s=0.5, wait_s_max=60.0)
QUEUE_WAITS = Waits(first_s=0.25, wait_s_max=30.0)
BACKGROUND = frozenset({Kind.SCRUB, Kind.ORPHANS})
"""What may take hours: a worker does one of these at a time, so that drains find a hand free."""

log = logging.getLogger(__name__)

Ended = Callable[[Item, str, float], None]


@dataclass(slots=True, eq=False)
class _Doing:
    """One claimed item under way; ``stop`` ends it, ``lost`` when another has it now."""

    claim: Claim
    stop: threading.Event = field(default_factory=threading.Event)
    lost: bool = False
    background: bool = False
    kind: Kind | None = None


class Worker:
    """Takes items from a queue until it is stopped.

    Args:
        name: Under which it claims.
        queue: Where items come from.
        service: Does them.
        pool: Its idle memory is given back when there is nothing to do.
        lease_s: How long the queue believes a silent worker.
    """

    def __init__(
        self, name: str, queue: Queue, service: PersistService, pool: PartPool, lease_s: float
    ) -> None:
        self._name = name
        self._queue = queue
        self._service = service
        self._pool = pool
        self._beat_s = lease_s / 3
        self._stop = threading.Event()
        self._guard = threading.Condition()
        self._doing: set[_Doing] = set()
        self.queue_answers = True
        self.on_ended: list[Ended] = []
        """Told by any thread how an item ended: the kind of the error or "", seconds."""

    def kinds_under_way(self) -> list[Kind]:
        """Return the kinds of the items that are being done."""
        with self._guard:
            return [doing.kind for doing in self._doing if doing.kind]

    def stop(self) -> None:
        """End ``run`` soon; from any thread."""
        with self._guard:
            self._stop.set()
            for doing in self._doing:
                doing.stop.set()
            self._guard.notify_all()

    def run(self) -> None:
        """Claim and do until ``stop``; then give everything back, within ``DRAIN_S_MAX``."""
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beating.start()
        failures = 0
        while not self._stop.is_set():
            try:
                self._claim()
                failures = 0
                self.queue_answers = True
            except CheckpointError as error:
                failures += 1
                self.queue_answers = False
                if worth_telling(failures):
                    log.warning("the queue does not answer: %s", error)
                self._stop.wait(QUEUE_WAITS.wait_s(failures))
        self._drain()

    def _claim(self) -> None:
        """Claim as many items as there are hands free; wait until there is one."""
        with self._guard:
            self._guard.wait_for(
                lambda: self._stop.is_set() or len(self._doing) < ITEMS_COUNT_MAX, CLAIM_WAIT_S
            )
            free = ITEMS_COUNT_MAX - len(self._doing)
        if free <= 0 or self._stop.is_set():
            return
        if free == ITEMS_COUNT_MAX:
            self._pool.trim()
        for claim in self._queue.claim(self._name, count_max=free, wait_s=CLAIM_WAIT_S):
            doing = _Doing(claim)
            with self._guard:
                self._doing.add(doing)
                if self._stop.is_set():
                    doing.stop.set()
            threading.Thread(
                target=self._do, args=(doing,), name=f"item-{claim.item}", daemon=True
            ).start()

    def _do(self, doing: _Doing) -> None:
        """Do one item to its end, whatever that is, and settle its claim."""
        try:
            settle = self._outcome(doing)
            if not doing.lost:
                settle()
        except CheckpointError as error:
            # The claim runs out by itself, and the item comes again.
            log.warning("%s is not settled: %s", doing.claim.item, error)
        finally:
            with self._guard:
                self._doing.discard(doing)
                self._guard.notify_all()

    def _outcome(self, doing: _Doing) -> Callable[[], None]:
        """Do the item if it is still due; return how its claim is to be settled."""
        claim = doing.claim
        try:
            item = parse(claim.item)
            if item.kind in BACKGROUND and not self._only_background(doing):
                return lambda: self._queue.release(claim, delay_s=BACKGROUND_REST_S)
            work = self._service.plan(item)
        except (InvalidRequestError, NotFoundError) as error:
            log.debug("%s is dropped: %s", claim.item, error)
            return lambda: self._queue.acknowledge(claim)
        except CheckpointError as error:
            log.warning("%s cannot be planned: %s", claim.item, error)
            return self._later(claim)
        return self._perform(doing, item, work)

    def _perform(self, doing: _Doing, item: Item, work: Work) -> Callable[[], None]:
        claim = doing.claim
        doing.kind, began_s = item.kind, time.monotonic()
        try:
            self._service.do(item, work, doing.stop)
        except StoppedError:
            log.info("%s is left to others", claim.item)
            return lambda: self._queue.release(claim, delay_s=0.0)
        except CheckpointError as error:
            log.warning("%s failed, delivery %d: %s", claim.item, claim.deliveries, error)
            self._ended(item, error.kind, began_s)
            self._tell_failed(claim, work, error)
            return self._later(claim)
        except Exception as error:
            log.exception("%s failed, delivery %d", claim.item, claim.deliveries)
            self._ended(item, InternalError.kind, began_s)
            self._tell_failed(claim, work, InternalError(repr(error)))
            return self._later(claim)
        self._ended(item, "", began_s)
        return lambda: self._queue.acknowledge(claim)

    def _ended(self, item: Item, error: str, began_s: float) -> None:
        for told in self.on_ended:
            told(item, error, time.monotonic() - began_s)

    def _only_background(self, doing: _Doing) -> bool:
        """Take the one place for what may take hours; False when it is taken."""
        with self._guard:
            doing.background = not any(other.background for other in self._doing)
        return doing.background

    def _later(self, claim: Claim) -> Callable[[], None]:
        return lambda: self._queue.release(claim, delay_s=ITEM_WAITS.wait_s(claim.deliveries))

    def _tell_failed(self, claim: Claim, work: Work, error: CheckpointError) -> None:
        if worth_telling(claim.deliveries):
            message = f"{claim.item}: {error}"
            context = {"error": error.kind, "deliveries": claim.deliveries}
            job = "" if isinstance(work, SweepWork) else work.job
            self._service.tell("persist_failed", message, job, **context)

    def _beat(self) -> None:
        """Keep the claims; end what another worker has taken over."""
        while True:
            with self._guard:
                self._guard.wait_for(self._is_over, self._beat_s)
                if self._is_over():
                    return
                doing = list(self._doing)
            try:
                lost = self._queue.heartbeat(self._name, [each.claim for each in doing])
            except CheckpointError as error:
                log.warning("no heartbeat: %s", error)
                continue
            tokens = {claim.token for claim in lost}
            for each in doing:
                if each.claim.token in tokens:
                    log.warning("%s was taken over by another worker", each.claim.item)
                    each.lost = True
                    each.stop.set()

    def _is_over(self) -> bool:
        return self._stop.is_set() and not self._doing

    def _drain(self) -> None:
        """Wait for parts in flight; give stuck items back, for other workers to continue."""
        with self._guard:
            self._guard.wait_for(lambda: not self._doing, DRAIN_S_MAX)
            hanging = list(self._doing)
        for doing in hanging:
            doing.lost = True
            try:
                self._queue.release(doing.claim, delay_s=0.0)
            except CheckpointError as error:
                log.warning("%s is not given back: %s", doing.claim.item, error)
