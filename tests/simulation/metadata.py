"""Metadata services over one database: the real use cases, each one event, each with its cache.

``Fleet`` is how the others reach them: one at a time, another one when that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tests.simulation.catalogue import Database
from tests.simulation.ghosts import Ghosts
from tests.simulation.plan import NODE_LEASE_S, Plan
from tests.simulation.world import Do, Reply, World

from holdfast.bucket.listing import places
from holdfast.core.attempts import Seat
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Inventory
from holdfast.core.node_view import NodeView
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.format.keys import Place
from holdfast.objectstore import ObjectStore
from holdfast_services.kit.queue import Queue
from holdfast_services.metadata.calls import catalogue_from_bucket, rollback_records
from holdfast_services.metadata.calls.reports import WATCH_POLL_S
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.attempts import Registration
from holdfast_services.metadata.domain.inventory_limits import received
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.domain.node_view import World as Snapshot
from holdfast_services.metadata.domain.node_view import node_view
from holdfast_services.metadata.loops.offers import ORPHANS, RECONCILE_S
from holdfast_services.metadata.loops.retention import SWEEP_S
from holdfast_services.metadata.loops.tick import TICK_S
from holdfast_services.metadata.storage import Catalogue, DecodeCache
from holdfast_services.metadata.usecases import agents, rollbacks, users, workers
from holdfast_services.metadata.usecases.agents import SeatWish
from holdfast_services.metadata.usecases.workers import Ages

T = TypeVar("T")
Answer = Callable[[T | CheckpointError], None]

DECIDE_WAIT_S = 6.0
OFFER_S = 0.2
BATCH_S_MAX = 0.02
AGES = Ages(orphan_s=20.0)


class Metadata:
    """One service, until it dies; ``heard`` wakes those who watch."""

    def __init__(
        self, fleet: Fleet, name: str, store: ObjectStore | None, queue: Queue | None
    ) -> None:
        self._fleet, self.name = fleet, name
        self._world, self._database = fleet.world, fleet.database
        self._store, self._queue = store, queue
        self.limits = Limits(
            node_lease_s=NODE_LEASE_S, decide_wait_s=DECIDE_WAIT_S,
            listen_s=agents.LISTEN_S, object_tier=store is not None,
        )  # fmt: skip
        self.alive = False
        self._life = 0

    def start(self) -> None:
        """Begin, with nothing remembered."""
        self.alive = True
        self._life += 1
        self._cache = DecodeCache()
        self._snapshot: tuple[int, Snapshot] | None = None
        self._views: dict[str, NodeView] = {}
        self._offered: set[str] = set()
        self._wishes: list[tuple[SeatWish, Answer[Seat]]] = []
        self._reports: list[tuple[Inventory, Answer[NodeView]]] = []
        self._loop(TICK_S, self._tick)
        if self._store:
            self._loop(RECONCILE_S, self._offer_all)
            self._loop(SWEEP_S, self._retain)

    def kill(self) -> None:
        """End at once."""
        self.alive = False

    def _soon(self, most_s: float, do: Do) -> None:
        life = self._life
        self._world.soon(
            most_s, lambda: do() if self.alive and life == self._life else None, self.name
        )

    def _loop(self, every_s: float, do: Do) -> None:
        life = self._life

        def turn() -> None:
            if not self.alive or life != self._life:
                return
            with suppress(CheckpointError):  # the database is away: the next turn comes
                do()
            self._world.later(every_s, turn, self.name)

        self._world.soon(every_s, turn, self.name)

    # -- what agents call ------------------------------------------------------------------------

    def register(self, wish: Registration, answer: Answer[Seat]) -> None:
        """Seat a rank, with all that come within a moment in one transaction."""
        item = SeatWish(wish, first_run(wish.spec.job))
        try:
            if self._store and self.read(lambda c: agents.begun(c, wish.spec.job, wish.spec.nonce)):
                item = replace(item, begun=True)
            elif self._store:
                item = replace(item, newest=self._look_up(self._store, wish))
        except CheckpointError as error:
            answer(error)
            return
        self._wishes.append((item, answer))
        if len(self._wishes) == 1:
            self._soon(BATCH_S_MAX, self._seat)

    def _seat(self) -> None:
        waiting, self._wishes = self._wishes, []
        wishes = [wish for wish, _ in waiting]
        try:
            seats = self.write(lambda c: agents.register(c, wishes, self.limits))
        except CheckpointError as error:
            seats = [error] * len(waiting)
        else:
            self._fleet.changed(self)
        for (_, answer), seat in zip(waiting, seats, strict=True):
            answer(seat)

    def _look_up(self, store: ObjectStore, wish: Registration) -> CheckpointId | None:
        """What ``Registrations._ask`` and ``BucketArchive`` do, in one turn."""
        job, trains = wish.spec.job, wish.spec.generation
        newest = self.read(lambda c: agents.known(c, job))
        try:
            here = self.read(lambda c: catalogue_from_bucket.known(c, job))
            reading = catalogue_from_bucket.read(store, job, threading.Event(), here)
            written = self.write(lambda c: catalogue_from_bucket.write(c, job, reading))
            keys = [item.manifest.checkpoint for item in written.found]
            there = set(places(store, job)) if written.known and keys else set()
            gone = [key for key in keys if written.known and Place(job, key) not in there]
            if gone:
                self.write(lambda c: catalogue_from_bucket.forget(c, job, gone))
            stored = here.stored if here else frozenset()
            with suppress(CheckpointError):
                self._record(store, job)
            return max({*keys, *stored}.difference(gone), default=None)
        except CheckpointError as error:
            if not newest and not trains:
                raise UnavailableError("nobody knows whether the job is new") from error
            return newest

    def roll_back(self, wish: rollbacks.Wish, going_back: Callable[[], None]) -> None:
        """What ``calls.rollbacks.roll_back`` does, in one turn; the bucket may tell of others."""
        if self._store:
            reading = catalogue_from_bucket.read(self._store, wish.at.job, threading.Event())
            self.write(lambda c: catalogue_from_bucket.write(c, wish.at.job, reading))
        going_back()
        self.write(lambda c: rollbacks.roll_back(c, wish))
        self._fleet.changed(self)
        if self._store:
            self._record(self._store, wish.at.job)

    def _record(self, store: ObjectStore, job: str) -> None:
        run = self.read(lambda c: c.run_of(job))
        for owed in self.read(lambda c: c.unrecorded_rollbacks(run)) if run else ():
            rollback_records.write(store, job, owed)
            self.write(lambda c, owed=owed: c.note_recorded(run, owed.generation))  # type: ignore[misc]

    def report(self, inventory: Inventory, answer: Answer[NodeView]) -> None:
        """Take an inventory, with all that come within a moment in one transaction."""
        self._reports.append((received(inventory), answer))
        if len(self._reports) == 1:
            self._soon(BATCH_S_MAX, self._take)

    def _take(self) -> None:
        """Answer each with the view of a snapshot taken after all of them."""
        waiting, self._reports = self._reports, []
        items = [item for item, _ in waiting]
        try:
            least, told = self.write(lambda c: agents.report(c, items, self.limits))
            views = [self.view(item.node.node) for item in items]
        except CheckpointError as error:
            for _, answer in waiting:
                answer(error)
            return
        if told is not None:
            self._fleet.changed(self)
        for (_, answer), view, minimum in zip(waiting, views, least, strict=True):
            answer(replace(view, incarnation_min=minimum))

    def view(self, node: str) -> NodeView:
        """Return what a watch would answer now; all that one change wakes share a snapshot."""
        number = self._database.writes_count
        if self._snapshot is None or self._snapshot[0] != number:
            loaded = self.read(lambda c: agents.snapshot(c, self.limits))
            self._snapshot = (number, loaded)
            self._views.clear()
        if node not in self._views:
            self._views[node] = node_view(self._snapshot[1], node)
        return self._views[node]

    # -- the clock -------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.write(lambda c: agents.tick(c, self.limits)):
            self._fleet.changed(self)

    def offer_new(self) -> None:
        """Offer what has become due since all of it was offered."""
        if self.alive and self._queue:
            try:
                items = [i for i in self.read(workers.drain_items) if i not in self._offered]
                self._offer(items)
            except CheckpointError:
                return

    def _offer_all(self) -> None:
        items = self.read(workers.drain_items)
        items += self.read(lambda c: workers.bucket_items(c, AGES))
        self._offered.clear()
        self._offer([*items, ORPHANS])

    def _offer(self, items: list[str]) -> None:
        assert self._queue is not None
        if items:
            self._queue.offer(items)
            self._offered.update(items)

    def _retain(self) -> None:
        for policed in self.read(lambda c: c.policed()):
            job = policed.job
            self.write(lambda c, job=job: users.expire(c, job))  # type: ignore[misc]

    # -- transactions ------------------------------------------------------------------------------

    def read(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case on one snapshot."""
        return self._database.read(self._cache, use_case)

    def write(self, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case in a transaction."""
        return self._database.write(self._cache, use_case)


class Fleet:
    """All metadata services, and the ways to them."""

    def __init__(
        self, world: World, plan: Plan, ghosts: Ghosts, store: ObjectStore | None,
        queue: Queue | None,
    ) -> None:  # fmt: skip
        self.world = world
        self.database = Database(world, ghosts)
        self.services = [
            Metadata(self, f"metadata {number}", store, queue) for number in range(plan.metadata)
        ]
        self.wake: list[Do] = []
        """Called when something has changed: agents ask for their view."""
        self._via: dict[str, int] = {}
        for service in self.services:
            service.start()

    def of(self, name: str) -> Metadata:
        """Return a service by name."""
        return self.services[int(name.rpartition(" ")[2])]

    def changed(self, service: Metadata) -> None:
        """Wake who watches this service soon, who watches another when that one looks again."""
        alone = len(self.services) == 1
        wait_s = 0.002 if alone or self.world.rng.random() < 0.5 else WATCH_POLL_S
        for wake in self.wake:
            self.world.soon(wait_s, wake)
        self.world.soon(OFFER_S, service.offer_new, service.name)

    def call(
        self, source: str, do: Callable[[Metadata], Do], failed: Callable[[CheckpointError], None]
    ) -> None:
        """Ask one service; ``do`` runs there, and what it returns at the asker."""
        service = self._service(source)

        def take() -> Do | None:
            if not service.alive:
                return None
            try:
                return do(service)
            except CheckpointError as error:
                return lambda error=error: failed(error)  # type: ignore[misc]

        self.world.call(source, service.name, take, self._silent(source, failed))

    def bring(
        self, source: str, put: Callable[[Metadata, Answer[T]], None], then: Callable[[T], Do],
        failed: Callable[[CheckpointError], None],
    ) -> None:  # fmt: skip
        """Bring one service what it takes in batches; ``then`` runs there as in ``call``."""
        service = self._service(source)

        def take(reply: Reply) -> None:
            def answer(given: T | CheckpointError) -> None:
                if isinstance(given, CheckpointError):
                    reply(lambda: failed(given))
                else:
                    reply(then(given))

            if service.alive:
                put(service, answer)

        self.world.request(source, service.name, take, self._silent(source, failed))

    def _service(self, source: str) -> Metadata:
        return self.services[self._via.get(source, 0) % len(self.services)]

    def _silent(self, source: str, failed: Callable[[CheckpointError], None]) -> Do:
        def silent() -> None:
            self._via[source] = self._via.get(source, 0) + 1
            failed(UnavailableError("metadata does not answer"))

        return silent

    def ask(self, source: str, use_case: Callable[[Metadata], T]) -> T:
        """Ask a service and have the answer at once: for callers that are one event themselves.

        Raises:
            UnavailableError: the request or its answer was lost.
            CheckpointError: what the service answered.
        """
        service = self._service(source)
        there = service.alive and not self.world.frozen(service.name)
        if not there or not self.world.passes(source, service.name):
            self._via[source] = self._via.get(source, 0) + 1
            raise UnavailableError("metadata does not answer")
        answer = use_case(service)
        if not self.world.passes(service.name, source):
            raise UnavailableError("metadata has not answered")
        return answer
