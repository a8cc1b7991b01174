"""The agent's shell: owns the state, feeds events to the residency machine, tells what changed.

One thread owns the state: ``dispatch`` is called on the loop only. What the machine decides the
``Performer`` does; what came of it comes back here as events. Knows no rule and no network.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from holdfast.core.ids import ShardId
from holdfast.core.inventory import Inventory
from holdfast.core.node_view import NodeView
from holdfast.core.session import SessionView
from holdfast.core.slot_names import SlotState
from holdfast.core.user_events import Event
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.domain import (
    State,
    asks_to_report,
    handle,
    inventory,
    pressing,
    reports_alike,
    session_view,
    shows_alike,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.performer import Performer

SCAN_S = 0.2


class Shell:
    """The state of one agent, and all that may change it.

    Args:
        state: As ``recovery.adopt`` made it.
        arena: Where locks and names of slots are looked at.
        performer: Performs the actions; stopped by whoever made it.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        state: State,
        arena: Arena,
        performer: Performer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._arena = arena
        self._performer = performer
        self._clock = clock
        self._changed = asyncio.Event()
        self._views: dict[str, SessionView] = {}
        self._bare: dict[str, SessionView] = {}
        self._views_count = 0
        self._inventory: Inventory | None = None
        self._told: State | None = None
        """The state that sessions and metadata were last told of."""
        self._broken: Exception | None = None
        self._waiting: dict[ShardId, list[Callable[[str], None]]] = defaultdict(list)
        self.on_inventory: Callable[[bool], None] = lambda _: None
        self.on_event: Callable[[Event], None] = lambda _: None

    # ------------------------------------------------------------------------- the machine

    def dispatch(self, event: ev.AgentEvent) -> None:
        """Feed one event to the machine and begin what it decides.

        Raises:
            Exception: something of it could not be begun; the agent ends at its next turn.
        """
        before = self.state
        self.state, actions = handle(before, event, now_s=self._clock())
        try:
            self._perform(event, before, actions)
        except Exception as error:
            self._broken = error
            raise

    def _perform(self, event: ev.AgentEvent, before: State, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Emit):
                self.on_event(action.event)
            else:
                self._performer.begin(action, self.dispatch)
        self._serve({*_came(event), *_went(before, actions)})
        if isinstance(event, ev.ElementMade):
            self._serve_element(event.held.element.key)
        self._answer(event)
        self._publish()

    def _serve(self, shards: set[ShardId]) -> None:
        """Serve the copies that are kept: one may have come, another of the same shard gone."""
        for shard in shards:
            slot = self.state.held(shard)
            if slot is not None:
                self._performer.serve(shard.key, slot)

    def _serve_element(self, key: str) -> None:
        slot = self.state.elements().get(key)
        if slot is not None:
            self._performer.serve(key, slot)

    def _answer(self, event: ev.AgentEvent) -> None:
        if isinstance(event, ev.FetchDone | ev.FetchFailed) and (
            event.name.state is SlotState.PARTIAL
        ):
            return  # parts for a restore here: whoever waits for a copy is still to be answered
        if isinstance(event, ev.FetchDone):
            shard, outcome = event.content.shard.id, ""
        elif isinstance(event, ev.FetchFailed):
            shard, outcome = event.shard, event.reason
        else:
            return
        for hear in self._waiting.pop(shard, []):
            hear(outcome)

    def _publish(self) -> None:
        """Tell sessions and metadata what has changed, and wake the calls that wait for it."""
        before, self._told = self._told, self.state
        if before is None or not shows_alike(before, self.state):
            self._show()
        if before is None or not reports_alike(before, self.state):
            self._report()
        if asks_to_report(before.view if before else None, self.state.view):
            self.on_inventory(True)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _show(self) -> None:
        """Number the changed views."""
        for session in self.state.sessions.values():
            view = session_view(self.state, session)
            if self._bare.get(session.id) != view:
                self._views_count += 1
                self._bare[session.id] = view
                self._views[session.id] = replace(view, version=str(self._views_count))
        for gone in self._views.keys() - self.state.sessions.keys():
            del self._views[gone], self._bare[gone]

    def _report(self) -> None:
        """Have a changed inventory reported."""
        now = inventory(self.state, incarnation=0, sequence=0)
        if now != self._inventory:
            before, self._inventory = self._inventory, now
            self.on_inventory(pressing(before, now))

    # ----------------------------------------------------------------------------- waiting

    def view_of(self, session: str) -> SessionView | None:
        """Return the numbered view of a session; None when there is no such session."""
        return self._views.get(session)

    def when_fetched(self, shard: ShardId, hear: Callable[[str], None]) -> None:
        """Have ``hear`` called once, when a fetch of a shard ends: with "", or why it failed."""
        self._waiting[shard].append(hear)

    async def until(self, met: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition on the state; False when ``wait_s`` is over before."""
        until_s = self._clock() + wait_s
        while not met():
            left_s = until_s - self._clock()
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return met()
        return True

    # ---------------------------------------------------------------------------- the loop

    async def scan(self) -> None:
        """Look at locks and names until cancelled: deaths, closed slots, time.

        Raises:
            Exception: what was decided is half done. State and folder differ, and what was not
                begun is never answered: the next agent adopts what is in the folder.
        """
        while True:
            self.turn()
            await asyncio.sleep(SCAN_S)

    def turn(self) -> None:
        """Look once at locks, names and the clock."""
        if self._broken is not None:
            raise self._broken
        for session in list(self.state.sessions.values()):
            if self._arena.session_alive(session.id):
                continue
            self._arena.forget_session(session.id)
            if session.live:
                self.dispatch(ev.SessionEnded(session.id))
        self.look()
        self.dispatch(ev.Tick(self._clock()))

    def look(self) -> None:
        """Read the folder for slots that were closed."""
        for slot, name in self._arena.names().items():
            known = self.state.slots.get(slot)
            if name.state is SlotState.CLOSED and known and known.name != name:
                self.dispatch(ev.SlotClosed(name))

    # ---------------------------------------------------------------------- for the reporter

    def inventory(self, *, incarnation: int, sequence: int, leaving: bool) -> Inventory:
        """Return all that this agent holds."""
        return inventory(self.state, incarnation=incarnation, sequence=sequence, leaving=leaving)

    @property
    def view_version(self) -> str:
        """The version of the last view, empty before the first."""
        return self.state.view.version if self.state.view else ""

    def view_arrived(self, view: NodeView) -> None:
        """Take the view that metadata answered."""
        self.dispatch(ev.ViewArrived(view))

    def metadata_lost(self, reason: str) -> None:
        """Record that metadata does not answer."""
        self.dispatch(ev.MetadataLost(reason))


def _came(event: ev.AgentEvent) -> Iterator[ShardId]:
    """Return the shard that an event brought here."""
    if isinstance(event, ev.FetchDone | ev.SlotSealed):
        yield event.content.shard.id


def _went(before: State, actions: Sequence[ev.Action]) -> Iterator[ShardId]:
    """Return the shards of which a copy is freed or quarantined."""
    for action in actions:
        if isinstance(action, ev.Quarantine):
            yield action.content.shard.id
        elif isinstance(action, ev.RenameSlot) and action.old.state is SlotState.SEALED:
            content = before.slots[action.old.slot].content
            if content is not None:
                yield content.shard.id
