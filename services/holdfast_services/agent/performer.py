"""Performs what the residency machine decides; what came of an action goes back as events.

One method per action. Renames and quarantines are done at once, on the loop; what blocks runs in
``THREADS_COUNT`` threads, fetches in threads of their own. Owns no state of the machine and
decides nothing: each action is answered, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.core.inventory import Peer
from holdfast.core.slot_names import SlotState
from holdfast.errors import CheckpointError, ExhaustedError
from holdfast_services.agent import sealer
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain import Slot
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.fetcher import Fetcher
from holdfast_services.agent.numa import on_node_of
from holdfast_services.transport import ServedSegments

THREADS_COUNT = 4
REASONS_COUNT_MAX = 64
"""So many failures are remembered as logged; then the oldest is logged again."""

log = logging.getLogger(__name__)

Tell = Callable[[ev.AgentEvent], None]
Ended = Callable[[Sequence[ev.AgentEvent], float], None]


class Performer:
    """Performs the actions of one agent: at once, or in threads where they block.

    Args:
        me: This node.
        arena: The slots; closed by whoever opened it.
        served: Where the transport looks sealed segments up.
        fetcher: Performs fetches; stopped with this.
        peers: Ways to other agents.
    """

    def __init__(
        self, *, me: Peer, arena: Arena, served: ServedSegments, fetcher: Fetcher,
        peers: PeerClients,
    ) -> None:  # fmt: skip
        self._me = me
        self._arena = arena
        self._served = served
        self._fetcher = fetcher
        self._peers = peers
        self._threads = ThreadPoolExecutor(THREADS_COUNT, thread_name_prefix="arena")
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged = deque[str](maxlen=REASONS_COUNT_MAX)
        self.on_ended: list[Ended] = []
        """Told what came of an action that takes time, and after how many seconds."""
        self._at_once: dict[type[Any], Callable[[Any], None]] = {
            ev.RenameSlot: self.rename,
            ev.Quarantine: self.quarantine,
            ev.PaceFetches: self.pace_fetches,
        }
        self._blocking: dict[type[Any], Callable[[Any], Sequence[ev.AgentEvent]]] = {
            ev.CreateSlot: self.create,
            ev.DropSlot: self.drop,
            ev.SealSlot: self.seal,
            ev.VerifySlot: self.verify,
            ev.VerifyElement: self.verify_element,
            ev.ReclaimSlot: self.reclaim,
        }
        self._remote: dict[type[Any], Callable[[Any], Awaitable[Sequence[ev.AgentEvent]]]] = {
            ev.Fetch: self.fetch,
            ev.AskHold: self.ask_hold,
            ev.MakeElement: self.make_element,
        }

    def begin(self, action: ev.Action, tell: Tell) -> None:
        """Perform an action, or begin to; ``tell`` hears on the loop what came of it."""
        at_once = self._at_once.get(type(action))
        if at_once is not None:
            at_once(action)
            return
        task = asyncio.get_running_loop().create_task(self._run(action, tell))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work failed", exc_info=task.exception())

    @property
    def under_way_count(self) -> int:
        """How many actions were begun and have not ended: those that wait for a thread, too."""
        return len(self._tasks)

    async def _run(self, action: ev.Action, tell: Tell) -> None:
        began_s = time.monotonic()
        try:
            happened = await self._happened(action)
        except Exception as error:
            # The machine waits for an answer: without one it would never begin this again.
            # Many are tried again each tick.
            reason = f"{type(action).__name__} failed: {error!r}"
            if reason not in self._logged:
                self._logged.append(reason)
                log.exception("%s", reason)
            happened = ev.gave_up(action, f"{type(error).__name__}: {error}")
        for told in self.on_ended:
            told(happened, time.monotonic() - began_s)
        for event in happened:
            tell(event)

    async def _happened(self, action: ev.Action) -> Sequence[ev.AgentEvent]:
        remote = self._remote.get(type(action))
        if remote is not None:
            return await remote(action)
        work = self._blocking[type(action)]
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, action)

    def serve(self, key: str, slot: Slot) -> None:
        """Serve what a sealed slot holds under ``key``."""
        self._served.put(key, slot.name, self._arena.file(slot.name.slot).view)

    async def stop(self) -> None:
        """Interrupt transfers, let threads end; the arena's files stay as they are."""
        await asyncio.to_thread(self._fetcher.stop)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    # ------------------------------------------------------------------------------- at once

    def rename(self, action: ev.RenameSlot) -> None:
        """Move a slot to another state; what was served is withdrawn before."""
        if action.old.state in (SlotState.SEALED, SlotState.ELEMENT):
            # Withdraw first: readers look it up again after their last byte.
            self._served.withdraw(action.old)
        if not self._arena.rename(action.old, action.new):
            log.error("slot %s is not there to become %s", action.old, action.new.file_name)

    def quarantine(self, action: ev.Quarantine) -> None:
        """Serve a slot no more, and note for the next agent that its bytes are bad."""
        self._served.withdraw(action.name)
        sealer.note(self._arena, action.name, action.content)

    def pace_fetches(self, action: ev.PaceFetches) -> None:
        """Have fetches keep the rate for copies, or not."""
        self._fetcher.pace(limited=action.limited)

    # -------------------------------------------------- in threads; these touch no state

    def create(self, action: ev.CreateSlot) -> Sequence[ev.AgentEvent]:
        """Make and pre-fault a slot's file."""
        rank = self._arena.session_holder(action.session) if action.session else None
        try:
            with on_node_of(rank):
                self._arena.create(action.name, action.length_bytes)
        except (CheckpointError, OSError) as error:
            return [ev.SlotRefused(action.name.slot, str(error))]
        return [ev.SlotCreated(action.name.slot)]

    def drop(self, action: ev.DropSlot) -> Sequence[ev.AgentEvent]:
        """Unlink a slot's file; the machine has forgotten it already."""
        self._arena.drop(action.name)
        return []

    def seal(self, action: ev.SealSlot) -> Sequence[ev.AgentEvent]:
        """Hash a closed slot and seal it."""
        try:
            content = sealer.seal(
                self._arena, action.name, owner=self._me.node, expected=action.expected
            )
        except sealer.SlotBusyError:
            return [ev.SealBlocked(action.name)]
        except ExhaustedError as error:  # what is in the slot is worth trying again
            return [ev.SealBlocked(action.name, str(error))]
        except sealer.HeadlessError:
            return [ev.SealFailed(action.name, "")]
        except CheckpointError as error:
            return [ev.SealFailed(action.name, str(error))]
        return [ev.SlotSealed(action.name, content)]

    def verify(self, action: ev.VerifySlot) -> Sequence[ev.AgentEvent]:
        """Hash a sealed slot again."""
        good = sealer.intact(self._arena, action.name, action.content)
        return [ev.SlotVerified(action.name, good, action.decision)]

    def verify_element(self, action: ev.VerifyElement) -> Sequence[ev.AgentEvent]:
        """Hash an element again."""
        good = sealer.matches(self._arena, action.name, action.held.digests)
        return [ev.ElementVerified(action.name, good)]

    def reclaim(self, action: ev.ReclaimSlot) -> Sequence[ev.AgentEvent]:
        """Free a slot under its lock; unlink it instead if a fenced writer holds that."""
        file = self._arena.file(action.name.slot)
        if not file.lock():
            if action.replace and self._arena.drop(action.name):
                return [ev.Reclaimed(action.name, replaced=True)]
            return [ev.WorkBlocked(action.name)]
        try:
            freed = self._arena.rename(action.name, action.name.to(SlotState.FREE))
        finally:
            file.unlock()
        if not freed:
            return [ev.WorkBlocked(action.name)]
        return [ev.Reclaimed(action.name, replaced=False)]

    # ---------------------------------------------------------------------- from and at peers

    async def fetch(self, action: ev.Fetch) -> Sequence[ev.AgentEvent]:
        """Fetch a copy to this node, verified and sealed."""
        return await self._fetcher.fetch(action)

    async def make_element(self, action: ev.MakeElement) -> Sequence[ev.AgentEvent]:
        """Make an element of parity out of shards of other nodes."""
        return await self._fetcher.make_element(action)

    async def ask_hold(self, action: ev.AskHold) -> Sequence[ev.AgentEvent]:
        """Ask a backup to hold a copy; it answers once it does, or why not, or not yet."""
        try:
            held = await self._peers.hold(action.peer, action.shard, self._me)
        except CheckpointError as error:
            return [ev.HoldAnswered(action.shard.id, action.peer, error.kind, str(error))]
        return [ev.HoldAnswered(action.shard.id, action.peer, coming=not held)]
