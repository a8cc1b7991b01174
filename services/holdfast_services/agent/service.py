"""The agent's shell: feeds events to the residency machine and performs what it decides.

One loop owns the state; blocking work (hashing, populating, fetching) runs in bounded threads
and comes back as events. Use cases of the edges are methods here; rules are in ``domain``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from holdfast.core import facts
from holdfast.core.budget import MemoryWish, memory_need
from holdfast.core.facts import HeldState, Inventory, NodeView, Peer, Shard
from holdfast.core.ids import ShardId
from holdfast.core.retry import bounded
from holdfast.core.session import SessionUpdate, SessionView
from holdfast.core.slots import SlotState
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from holdfast_services.agent import sealer
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import Located, PeerClients
from holdfast_services.agent.domain import (
    Reservation,
    Session,
    State,
    Work,
    admit,
    dump,
    handle,
    inventory,
    pressing,
    room,
    rules,
    session_view,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.fetcher import Fetcher
from holdfast_services.transport import ServedSegments, deadline_s

SCAN_S = 0.2
WATCH_S_MAX = 60.0
RESERVE_S_BASE = 30.0
POPULATE_BYTES_PER_S_MIN = 200 << 20
THREADS_COUNT = 4

log = logging.getLogger(__name__)


class AgentService:
    """Everything one node's agent does.

    Args:
        state: As ``adoption.adopt`` made it.
        arena: The slots; closed by whoever opened it.
        served: Where the transport looks sealed segments up.
        fetcher: Performs fetches.
        peers: Ways to other agents.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        state: State,
        arena: Arena,
        served: ServedSegments,
        fetcher: Fetcher,
        peers: PeerClients,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._arena = arena
        self._served = served
        self._fetcher = fetcher
        self._peers = peers
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS_COUNT, thread_name_prefix="arena")
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._views: dict[str, SessionView] = {}
        self._views_count = 0
        self._inventory: Inventory | None = None
        self._outcomes: dict[ShardId, list[asyncio.Future[str]]] = defaultdict(list)
        self.on_inventory: Callable[[bool], None] = lambda _: None
        self.on_event: Callable[[facts.Event], None] = lambda _: None

    # ------------------------------------------------------------------------- the machine

    def dispatch(self, event: ev.Event) -> None:
        """Feed one event to the machine and begin what it decides."""
        self.state, actions = handle(self.state, event, now_s=self._clock())
        for action in actions:
            self._perform(action)
        self._settle(event)
        self._publish()

    def _settle(self, event: ev.Event) -> None:
        if isinstance(event, ev.FetchDone | ev.SlotSealed):
            self._serve(event.content.shard.id)
        if isinstance(event, ev.FetchDone):
            self._answer(event.content.shard.id, "")
        elif isinstance(event, ev.FetchFailed):
            self._answer(event.shard, event.reason)

    def _answer(self, shard: ShardId, outcome: str) -> None:
        for future in self._outcomes.pop(shard, []):
            if not future.done():
                future.set_result(outcome)

    def _publish(self) -> None:
        """Number what has changed and wake those who wait for it."""
        for session in self.state.sessions.values():
            view = session_view(self.state, session)
            known = self._views.get(session.id)
            if known is None or replace(known, version="") != view:
                self._views_count += 1
                self._views[session.id] = replace(view, version=str(self._views_count))
        for gone in self._views.keys() - self.state.sessions.keys():
            del self._views[gone]
        now = inventory(self.state, incarnation=0, sequence=0)
        if now != self._inventory:
            before, self._inventory = self._inventory, now
            self.on_inventory(pressing(before, now))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _perform(self, action: ev.Action) -> None:
        if isinstance(action, ev.RenameSlot):
            self._rename(action)
        elif isinstance(action, ev.Emit):
            self.on_event(action.event)
        elif isinstance(action, ev.Quarantine):
            self._served.withdraw(action.name)
            sealer.note(self._arena, action.name, action.content)
        else:
            self._spawn(self._run(action))

    def _rename(self, action: ev.RenameSlot) -> None:
        if action.old.state is SlotState.SEALED:
            # Withdraw first: readers look it up again after their last byte.
            self._served.withdraw(action.old)
        if not self._arena.rename(action.old, action.new):
            log.error("slot %s is not there to become %s", action.old, action.new.file_name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work failed", exc_info=task.exception())

    async def _run(self, action: ev.Action) -> None:
        try:
            happened = await self._happened(action)
        except Exception as error:
            # The machine waits for an answer: without one it would never begin this again.
            log.exception("%s failed", type(action).__name__)
            happened = ev.gave_up(action, f"{type(error).__name__}: {error}")
        for event in happened:
            self.dispatch(event)

    async def _happened(self, action: ev.Action) -> Sequence[ev.Event]:
        """Perform what takes long; return what came of it."""
        if isinstance(action, ev.Fetch):
            return await self._fetcher.fetch(action)
        if isinstance(action, ev.AskHold):
            return [await self._ask(action)]
        loop = asyncio.get_running_loop()
        happened = await loop.run_in_executor(self._threads, self._blocking, action)
        return [happened] if happened is not None else []

    def _blocking(self, action: ev.Action) -> ev.Event | None:
        """Perform what takes long; runs in a thread and touches no state."""
        if isinstance(action, ev.CreateSlot):
            try:
                self._arena.create(action.name, action.length_bytes)
            except (CheckpointError, OSError) as error:
                return ev.SlotRefused(action.name.slot, str(error))
            return ev.SlotCreated(action.name.slot)
        if isinstance(action, ev.DropSlot):
            self._arena.drop(action.name)
            return None
        if isinstance(action, ev.SealSlot):
            return self._seal(action)
        if isinstance(action, ev.VerifySlot):
            good = sealer.intact(self._arena, action.name, action.content)
            return ev.SlotVerified(action.name, good, action.decision)
        assert isinstance(action, ev.ReclaimSlot), f"unknown action {action}"
        return self._reclaim(action)

    def _seal(self, action: ev.SealSlot) -> ev.Event:
        try:
            content = sealer.seal(
                self._arena, action.name, owner=self.state.me.node, expected=action.expected
            )
        except sealer.SlotBusyError:
            return ev.SealBlocked(action.name)
        except ExhaustedError as error:  # what is in the slot is worth trying again
            return ev.SealBlocked(action.name, str(error))
        except CheckpointError as error:
            return ev.SealFailed(action.name, str(error))
        return ev.SlotSealed(action.name, content)

    def _reclaim(self, action: ev.ReclaimSlot) -> ev.Event:
        file = self._arena.file(action.name.slot)
        if not file.lock():
            if action.replace and self._arena.drop(action.name):
                return ev.Reclaimed(action.name, replaced=True)
            return ev.WorkBlocked(action.name)
        try:
            freed = self._arena.rename(action.name, action.name.to(SlotState.FREE))
        finally:
            file.unlock()
        if not freed:
            return ev.WorkBlocked(action.name)
        return ev.Reclaimed(action.name, replaced=False)

    def _serve(self, shard: ShardId) -> None:
        """Serve the copy that is kept; a second one may have been freed a moment ago."""
        slot = self.state.held(shard)
        if slot is not None:
            self._served.put(shard.key, slot.name, self._arena.file(slot.name.slot).view)

    async def _ask(self, action: ev.AskHold) -> ev.HoldAnswered:
        try:
            await self._peers.hold(action.peer, action.shard, self.state.me)
        except CheckpointError as error:
            return ev.HoldAnswered(action.shard.id, action.peer, error.kind, str(error))
        return ev.HoldAnswered(action.shard.id, action.peer)

    async def scan(self) -> None:
        """Look at locks and names until cancelled: deaths, closed slots, time."""
        while True:
            for session in list(self.state.sessions.values()):
                if self._arena.session_alive(session.id):
                    continue
                self._arena.forget_session(session.id)
                if session.live:
                    self.dispatch(ev.SessionEnded(session.id))
            self.look()
            self.dispatch(ev.Tick(self._clock()))
            await asyncio.sleep(SCAN_S)

    def look(self) -> None:
        """Read the folder for slots that were closed."""
        for slot, name in self._arena.names().items():
            known = self.state.slots.get(slot)
            if name.state is SlotState.CLOSED and known and known.name != name:
                self.dispatch(ev.SlotClosed(name))

    async def _until(self, met: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition on the state; False when ``wait_s`` is over before."""
        until_s = self._clock() + wait_s
        while not met():
            left_s = until_s - self._clock()
            if left_s <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                return met()
        return True

    # ---------------------------------------------------------------- use cases: a rank's session

    def check_session_lock(self, session: str) -> None:
        """Refuse a session whose lock nobody holds: its death could not be seen.

        Raises:
            PreconditionError: no process holds ``<arena>/sessions/<session>``.
        """
        if not self._arena.session_alive(session):
            raise PreconditionError(f"session {session} holds no lock in {self._arena.folder}")

    def session(self, session: str) -> Session:
        """Return an open session.

        Raises:
            NotFoundError: unknown here; open it (again) with the same id and nonce.
        """
        known = self.state.sessions.get(session)
        if known is None or not known.live:
            raise NotFoundError(f"session {session[:40]} is not open here", node=self.state.me.node)
        return known

    async def reserve(self, session: str, asked: Reservation) -> None:
        """Reserve slots; returns once they are leased, or held by what may not be freed yet.

        Raises:
            ExhaustedError: the budget or the file system cannot carry it.
            UnavailableError: pre-faulting takes longer than its deadline.
        """
        admit(self.state, self.session(session), asked)
        self.dispatch(ev.Reserved(session, asked))

        def left() -> int:
            return rules.quota_left(self.state, self.session(session))

        def settled() -> bool:
            creating = any(slot.work is Work.CREATING for slot in self.state.slots.values())
            refused = asked.length_bytes in self.state.refused
            return left() == 0 or refused or (not creating and self._full(asked))

        wait_s = RESERVE_S_BASE + asked.slots * asked.length_bytes / POPULATE_BYTES_PER_S_MIN
        if not await self._until(settled, wait_s):
            raise UnavailableError(f"slots are not pre-faulted after {wait_s:.0f} s; try again")
        refused = self.state.refused.get(asked.length_bytes)
        if refused and left() > 0:
            raise ExhaustedError(refused, node=self.state.me.node)
        if left() == asked.slots:
            raise ExhaustedError(
                f"no room for {asked.slots} slots: {self.state.used_bytes} of "
                f"{self.state.budget_bytes} bytes hold segments that may not be freed yet"
            )

    def _full(self, asked: Reservation) -> bool:
        free = room.free_slot(self.state, asked.length_bytes)
        return free is None and room.to_drop(self.state, asked.length_bytes) is None

    def refusal(self, job: str, wish: MemoryWish) -> str:
        """Return why a job that is about to begin does not fit, empty: it does."""
        nodes_count = max(wish.nodes_count, rules.nodes_known(self.state))
        need = memory_need(**asdict(replace(wish, nodes_count=nodes_count)))
        return rules.refusal(self.state, job, need)

    async def watch(self, session: str, version: str, wait_s: float) -> SessionView:
        """Return the session's view as soon as it differs from ``version``, or at the deadline.

        A session that ends meanwhile is answered at once, with its last view.
        """
        last = self._views[self.session(session).id]

        def over() -> bool:
            nonlocal last
            last = self._views.get(session, last)
            known = self.state.sessions.get(session)
            return known is None or not known.live or last.version != version

        await self._until(over, bounded(wait_s, WATCH_S_MAX))
        return last

    def update(self, update: SessionUpdate) -> None:
        """Take a rank's news; looks at once at slots it says it has closed."""
        session = self.session(update.session)
        for event in update.events:
            self.on_event(replace(event, job=event.job or session.spec.job))
        self.dispatch(ev.Updated(update))
        if update.closed_slots:
            self.look()

    def close_session(self, session: str) -> None:
        """End a session; a repeat is harmless."""
        self.dispatch(ev.SessionEnded(session))

    # ------------------------------------------------------------------- use cases: other agents

    async def hold(self, shard: Shard, source: Peer) -> None:
        """Fetch and hold a copy of another node's shard; returns once it is here, verified.

        Raises:
            ExhaustedError, PreconditionError: see ``room.check_holdable``.
            UnavailableError: it could not be fetched.
        """
        if self.state.held(shard.id) is not None:
            return
        room.check_holdable(self.state, shard)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._outcomes[shard.id].append(future)
        self.dispatch(ev.HoldAsked(shard, source))
        try:
            reason = await asyncio.wait_for(future, deadline_s(shard.length_bytes))
        except TimeoutError as cause:
            raise UnavailableError(f"copy of {shard.id.key} takes too long") from cause
        if reason:
            raise UnavailableError(reason, node=self.state.me.node)

    def locate(self, shard: ShardId) -> Located:
        """Return where a sealed copy is.

        Raises:
            NotFoundError: no servable copy here.
        """
        slot = self.state.held(shard)
        if slot is None or slot.content is None:
            raise NotFoundError(f"shard {shard.key} is not here", node=self.state.me.node)
        content = slot.content
        return Located(
            shard=content.shard,
            incarnation=slot.name.incarnation,
            digests=content.digests,
            path=str(self._arena.folder / slot.name.file_name),
        )

    async def suspect(self, shard: ShardId, incarnation: int) -> bool:
        """Hash a copy again that a peer found bad; True when it is, and is quarantined now."""
        slot = self.state.held(shard)
        if slot is None or slot.content is None or slot.name.incarnation != incarnation:
            return False
        name = slot.name
        self.dispatch(ev.Suspected(name))

        def checked() -> bool:
            now = self.state.slots.get(name.slot)
            return now is None or now.name != name or now.work is not Work.VERIFYING

        await self._until(checked, deadline_s(slot.length_bytes))
        after = self.state.slots.get(name.slot)
        content = after.content if after is not None and after.name == name else None
        return content is not None and content.held is HeldState.QUARANTINED

    async def verify(self, shard: ShardId) -> tuple[str, int]:
        """Hash a held copy again; return what is wrong with it, empty if nothing, and its length.

        Raises:
            NotFoundError: no copy here, not even a quarantined one.
        """
        copies = [s for s in self.state.slots.values() if s.content]
        mine = [s for s in copies if s.content and s.content.shard.id == shard]
        if not mine:
            raise NotFoundError(f"shard {shard.key} is not here", node=self.state.me.node)
        slot = self.state.held(shard)
        if slot is None or await self.suspect(shard, slot.name.incarnation):
            return "the bytes do not match the digests; quarantined", mine[0].length_bytes
        return "", slot.length_bytes

    # ---------------------------------------------------------------------- for the reporter

    def inventory(self, *, incarnation: int, sequence: int, leaving: bool) -> Inventory:
        """Return all that this agent holds."""
        return inventory(self.state, incarnation=incarnation, sequence=sequence, leaving=leaving)

    @property
    def view_version(self) -> str:
        """The version of the last view, empty before the first."""
        return self.state.view.version if self.state.view else ""

    def view_arrived(self, view: NodeView) -> None:
        """Take what metadata answered."""
        self.dispatch(ev.ViewArrived(view))

    def metadata_lost(self, reason: str) -> None:
        """Take that metadata does not answer."""
        self.dispatch(ev.MetadataLost(reason))

    def dump(self) -> dict[str, object]:
        """Return the whole state as JSON values, for people (F46)."""
        return dump(self.state)

    async def stop(self) -> None:
        """Interrupt transfers, let threads end; the arena's files stay as they are."""
        await asyncio.to_thread(self._fetcher.stop)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
