"""The agent's use cases: what trainers and other agents ask of it.

Each reads the state, feeds an event to the shell, and waits for what it asked for if it must.
Rules are in ``domain``; decoding and encoding are the edges' part. Units: bytes, seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.budget import MemoryWish, Reservation, memory_need, saving_slots
from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.retry import bounded
from holdfast.core.session import SessionUpdate, SessionView
from holdfast.core.shard import Shard
from holdfast.errors import ExhaustedError, NotFoundError, PreconditionError, UnavailableError
from holdfast_services.agent import isal, sidecar
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import MetadataClient
from holdfast_services.agent.domain import (
    HeldSum,
    Session,
    State,
    Work,
    admit,
    dump,
    making_room,
    reservation_admission,
    slot_rules,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.shell import Shell
from holdfast_services.transport import deadline_s
from holdfast_services.transport.located import Located
from holdfast_services.transport.preferred import TransportState

WATCH_S_MAX = 60.0
RESERVE_S_MAX = 5.0
"""How long who reserves is kept to hear that there is no room; slots are made after that, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Name and size of a node; ``refusal`` says why a job that is about to begin does not fit.

    ``free_bytes`` of its file system are free, and ``wanted_bytes`` slots still need of it.
    """

    node: str
    arena: str
    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    metadata_address: str
    metadata_reachable: bool
    refusal: str
    transports: tuple[TransportState, ...] = ()
    unchanged_bytes: int = 0
    replicate_bytes_per_s: int = 0
    free_bytes: int = 0
    wanted_bytes: int = 0


class AgentService:
    """Everything that one node's agent is asked for.

    Args:
        shell: The state, and the only way to change it.
        arena: Where slots are and who is alive; closed by whoever opened it.
        metadata: The way to the catalogue.
        transports: Says how the ways to other agents' bytes fare.
        unchanged_bytes: Says how much of the copies made here did not have to come.
        replicate_bytes_per_s: The rate at which copies are fetched; 0: no limit.
    """

    def __init__(
        self,
        shell: Shell,
        arena: Arena,
        metadata: MetadataClient,
        transports: Callable[[], tuple[TransportState, ...]] = tuple,
        unchanged_bytes: Callable[[], int] = int,
        *,
        replicate_bytes_per_s: int = 0,
    ) -> None:
        self._transports = transports
        self._unchanged_bytes = unchanged_bytes
        self._replicate_bytes_per_s = replicate_bytes_per_s
        self._shell = shell
        self._arena = arena
        self._metadata = metadata

    @property
    def _state(self) -> State:
        return self._shell.state

    @property
    def arena_folder(self) -> str:
        """Where this node's slots are."""
        return str(self._arena.folder)

    @property
    def node(self) -> str:
        """The name of this node."""
        return self._state.me.node

    # ------------------------------------------------------------------------ a rank's session

    def describe(self, job: str, wish: MemoryWish) -> Description:
        """Return name and size of this node, and whether ``job`` fits (empty: no job)."""
        state = self._state
        return Description(
            node=self.node,
            arena=self.arena_folder,
            budget_bytes=state.budget_bytes,
            used_bytes=state.used_bytes,
            reserved_bytes=reservation_admission.reserved_bytes(state),
            metadata_address=self._metadata.address,
            metadata_reachable=not state.lost,
            refusal=self._refusal(job, wish) if job else "",
            transports=self._transports(),
            unchanged_bytes=self._unchanged_bytes(),
            replicate_bytes_per_s=self._replicate_bytes_per_s,
            free_bytes=self._arena.free_bytes,
            wanted_bytes=reservation_admission.unmade_bytes(state) + self._digests_bytes(),
        )

    def _digests_bytes(self) -> int:
        """Return what the sidecars of slots will take that have none yet."""
        return sum(
            sidecar.length_bytes(slot.length_bytes)
            for slot in self._state.slots.values()
            if slot.content is None and slot.element is None
        )

    def _refusal(self, job: str, wish: MemoryWish) -> str:
        nodes_count = max(wish.nodes_count, reservation_admission.nodes_known(self._state))
        need = memory_need(
            own_bytes=wish.own_bytes,
            restored_bytes=wish.restored_bytes,
            protection=wish.protection,
            nodes_count=nodes_count,
            slots=wish.slots,
            persist=wish.persist,
            shards_count=wish.shards_count,
        )
        return reservation_admission.refusal(
            self._state, job, need
        ) or reservation_admission.refusal_of_files(self._state, job, need, self._arena.free_bytes)

    async def open_session(self, session: str, spec: AttemptSpec) -> Seat:
        """Register a rank with metadata and open its session; a repeat is harmless.

        Metadata is told the spec as it came; this node adds its name and what it has seen.

        Raises:
            PreconditionError: no process holds ``<arena>/sessions/<session>``: its death could not
                be seen; or parity is asked for, and this node lacks its library.
            CheckpointError: metadata refuses the rank, or does not answer.
        """
        if spec.parity is not None:
            isal.check()
        if not self._arena.session_alive(session):
            raise PreconditionError(f"session {session} holds no lock in {self._arena.folder}")
        seen = slot_rules.generation_seen(self._state, spec.job)
        seat = await self._metadata.register(spec, node=self.node, generation_min=seen)
        self._shell.dispatch(ev.SessionOpened(Session(id=session, spec=spec, seat=seat)))
        return seat

    def session(self, session: str) -> Session:
        """Return an open session.

        Raises:
            NotFoundError: unknown here; open it (again) with the same id and nonce.
        """
        known = self._state.sessions.get(session)
        if known is None or not known.live:
            raise NotFoundError(f"session {session[:40]} is not open here", node=self.node)
        return known

    async def reserve(self, session: str, asked: Reservation) -> bool:
        """Reserve slots; returns once they are leased, or held by what may not be freed yet.

        Or after ``RESERVE_S_MAX``: touching their memory may take minutes on a busy machine, and
        goes on. Leases follow in the view, one by one, and what goes wrong then in an event.

        Returns:
            Whether it goes on.

        Raises:
            ExhaustedError: the budget or the file system cannot carry it.
        """
        admit(self._state, self.session(session), asked)
        self._shell.dispatch(ev.Reserved(session, asked))

        def left() -> int:
            return slot_rules.quota_left(self._state, self.session(session))

        def settled() -> bool:
            creating = any(slot.work is Work.CREATING for slot in self._state.slots.values())
            refused = bool(self.session(session).refused)
            return left() == 0 or refused or (not creating and self._full(asked))

        if not await self._shell.until(settled, RESERVE_S_MAX):
            return True
        known = self.session(session)
        refused = known.refused
        if refused and left() > 0:
            raise ExhaustedError(refused, node=self.node)
        if left() == saving_slots(asked.slots, persist=known.spec.persist.on):
            raise ExhaustedError(
                f"no room for {asked.slots} slots: {self._state.used_bytes} of "
                f"{self._state.budget_bytes} bytes hold segments that may not be freed yet"
            )
        return False

    def _full(self, asked: Reservation) -> bool:
        free = making_room.free_slot(self._state, asked.length_bytes)
        return free is None and making_room.to_drop(self._state, asked.length_bytes) is None

    async def watch(self, session: str, version: str, wait_s: float) -> SessionView:
        """Return the session's view as soon as it differs from ``version``, or at the deadline.

        A session that ends meanwhile is answered at once, with its last view.
        """
        known = self._shell.view_of(self.session(session).id)
        assert known is not None, "each open session has a view"
        last = known

        def over() -> bool:
            nonlocal last
            last = self._shell.view_of(session) or last
            known = self._state.sessions.get(session)
            return known is None or not known.live or last.version != version

        await self._shell.until(over, bounded(wait_s, WATCH_S_MAX))
        return last

    def update(self, update: SessionUpdate) -> None:
        """Take a rank's news; looks at once at slots it says it has closed.

        Raises:
            NotFoundError: see ``session``.
        """
        session = self.session(update.session)
        for event in update.events:
            self._shell.on_event(replace(event, job=event.job or session.spec.job))
        self._shell.dispatch(ev.Updated(update))
        if update.closed_slots:
            self._shell.look()

    def close_session(self, session: str) -> None:
        """End a session; a repeat is harmless."""
        self._shell.dispatch(ev.SessionEnded(session))

    def dump(self) -> dict[str, object]:
        """Return the whole state as JSON values, for people (F46)."""
        return dump(self._state)

    # ---------------------------------------------------------------------------- other agents

    async def hold(self, shard: Shard, source: Peer) -> bool:
        """Fetch and hold a copy of another node's shard; True once it is here, verified.

        False: it is coming, slower than usual, as at a rate for copies.

        Raises:
            ExhaustedError, PreconditionError: see ``making_room.check_holdable``.
            UnavailableError: it could not be fetched.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(reason: str) -> None:
            if not future.done():
                future.set_result(reason)

        self.begin_hold(shard, source, ended)
        try:
            async with asyncio.timeout(deadline_s(shard.length_bytes)):
                reason = await future
        except TimeoutError as cause:
            if self._comes(shard.id):
                return False
            raise UnavailableError(f"copy of {shard.id.key} takes too long") from cause
        if reason:
            raise UnavailableError(reason, node=self.node)
        return True

    def _comes(self, shard: ShardId) -> bool:
        """Tell whether a copy is being fetched, or waits for others that are."""
        under_way = any(tries.under_way for tries in self._state.fetches.values())
        return shard in self._state.holds and under_way

    def begin_hold(self, shard: Shard, source: Peer, hear: Callable[[str], None]) -> None:
        """See ``hold``; ``hear`` is called with "" once the copy is here, else with why not."""
        if self._state.held(shard.id) is not None:
            self._shell.dispatch(ev.HoldAsked(shard, source))
            hear("")
            return
        making_room.check_holdable(self._state, shard)
        self._shell.when_fetched(shard.id, hear)
        self._shell.dispatch(ev.HoldAsked(shard, source))

    def locate(self, shard: ShardId) -> Located:
        """Return where a sealed copy is.

        Raises:
            NotFoundError: no servable copy here.
        """
        slot = self._state.held(shard)
        if slot is None or slot.content is None:
            raise NotFoundError(f"shard {shard.key} is not here", node=self.node)
        content = slot.content
        return Located(
            shard=content.shard,
            slot_incarnation=slot.name.incarnation,
            part_digests=content.digests,
            path=str(self._arena.folder / slot.name.file_name),
        )

    async def suspect(self, shard: ShardId, incarnation: int) -> bool:
        """Hash a copy again that a peer found bad; True when it is, and is quarantined now."""
        slot = self._state.held(shard)
        if slot is None or slot.content is None or slot.name.incarnation != incarnation:
            return False
        name = slot.name
        self._shell.dispatch(ev.Suspected(name))

        def checked() -> bool:
            now = self._state.slots.get(name.slot)
            return now is None or now.name != name or now.work is not Work.VERIFYING

        await self._shell.until(checked, deadline_s(slot.length_bytes))
        after = self._state.slots.get(name.slot)
        content = after.content if after is not None and after.name == name else None
        return content is not None and content.held is HeldState.QUARANTINED

    def locate_element(self, key: str) -> tuple[HeldSum, int]:
        """Return an element with its digests, and the incarnation of its slot.

        Raises:
            NotFoundError: it is not here.
        """
        slot = self._state.elements().get(key)
        if slot is None or slot.element is None:
            raise NotFoundError(f"element {key[:120]} is not here", node=self.node)
        return slot.element, slot.name.incarnation

    async def suspect_element(self, key: str, incarnation: int) -> bool:
        """Hash an element again that a peer found bad; True when it is, and is dropped now."""
        slot = self._state.elements().get(key)
        if slot is None or slot.name.incarnation != incarnation:
            return False
        name = slot.name
        self._shell.dispatch(ev.ElementSuspected(name))

        def checked() -> bool:
            now = self._state.slots.get(name.slot)
            return now is None or now.name != name or now.work is not Work.VERIFYING

        await self._shell.until(checked, deadline_s(slot.length_bytes))
        after = self._state.slots.get(name.slot)
        return after is None or after.name != name

    async def verify(self, shard: ShardId) -> tuple[str, int]:
        """Hash a held copy again; return what is wrong with it, empty if nothing, and its length.

        Raises:
            NotFoundError: no copy here, not even a quarantined one.
        """
        copies = [s for s in self._state.slots.values() if s.content]
        mine = [s for s in copies if s.content and s.content.shard.id == shard]
        if not mine:
            raise NotFoundError(f"shard {shard.key} is not here", node=self.node)
        slot = self._state.held(shard)
        if slot is None or await self.suspect(shard, slot.name.incarnation):
            return "the bytes do not match the digests; quarantined", mine[0].length_bytes
        return "", slot.length_bytes
