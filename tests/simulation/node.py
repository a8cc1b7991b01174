"""A node: the agent's real shell and machine over an arena in a dict, with states and locks.

Files outlive the agent, nothing outlives the loss of the node. What the agent's performer does
with arena and other agents is done here, each piece of work an event of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.said import tcp
from tests.simulation import parity
from tests.simulation.checks import intact
from tests.simulation.fetch import Fetch
from tests.simulation.ghosts import Ghosts
from tests.simulation.metadata import Fleet, Metadata
from tests.simulation.segments import describe
from tests.simulation.world import Do, World

from holdfast.core.ids import ShardId
from holdfast.core.inventory import HeldState, Inventory, Peer
from holdfast.core.node_view import NodeView
from holdfast.core.reports import checked
from holdfast.core.session import SessionUpdate, SessionView
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.user_events import Event
from holdfast.errors import CheckpointError, NotFoundError
from holdfast_services.agent.domain import Content, HeldSum, Slot, State
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.reporter import COALESCE_S, HEARTBEAT_S, PROGRESS_S, REPORT_WAITS
from holdfast_services.agent.service import AgentService
from holdfast_services.agent.shell import Shell

if TYPE_CHECKING:
    from tests.simulation.bucket import Bucket

SCAN_S = 0.5
WORK_S_MAX = 0.03
FETCH_S_MAX = 0.1
HOLD_S_MAX = 30.0


@dataclass
class File:
    """One file of the arena; ``holder`` is the process that has its lock, None: nobody.

    ``shard`` is what header and sidecar say, of a sealed one; ``key`` what the header says;
    ``element`` what the sidecar of an element of parity says.
    """

    name: SlotName
    length_bytes: int
    data: bytes = b""
    key: ShardId | None = None
    world_size: int = 0
    shard: Shard | None = None
    owner: str = ""
    source: str = "memory"
    held: HeldState = HeldState.SEALED
    holder: object = None
    flipped: bool = False
    since_s: float = 0.0
    element: HeldSum | None = None


class Node:
    """A machine with an agent, which may be dead (``state`` None), and the files in its memory."""

    def __init__(
        self, world: World, name: str, fleet: Fleet, ghosts: Ghosts, bucket: Bucket | None,
        budget_bytes: int,
    ) -> None:  # fmt: skip
        self.world, self.name, self.fleet, self.ghosts = world, name, fleet, ghosts
        self.bucket = bucket
        self.me = Peer(node=name, rpc_address=f"{name}:1", endpoints=tcp(f"{name}:2"))
        self.budget_bytes = self.room_bytes = budget_bytes
        self.files: dict[str, File] = {}
        self.locks: set[str] = set()
        """Sessions whose process lives."""
        self.shell: Shell | None = None
        self.service: AgentService | None = None
        self.nodes: dict[str, Node] = {}
        self.there = True
        self.clock_off_s = 1e6
        self.on_view: Callable[[str, SessionView], None] = lambda *_: None
        self.life = 0
        self._incarnation = 0
        self._sequence = 0
        self._due_s = float("inf")
        self._asking = False
        self._failures = 0
        self._watching = self._news = False
        self._told: dict[str, SessionView] = {}

    # -- life and death ------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """What the files take."""
        return sum(file.length_bytes for file in self.files.values())

    @property
    def state(self) -> State | None:
        """What this node's agent knows; None: it is dead."""
        return self.shell.state if self.shell else None

    def start(self) -> None:
        """Start an agent over what lies here; see ``agent.recovery``."""
        assert self.shell is None
        self.life += 1
        self._incarnation, self._sequence = self._wall_ns(), 0
        self._asking, self._failures = False, 0
        self._due_s = float("inf")
        self._watching = self._news = False
        self._told.clear()
        for slot in [s for s, f in self.files.items() if f.name.state is SlotState.PARTIAL]:
            del self.files[slot]
        state = State(me=self.me, budget_bytes=self.budget_bytes)
        for slot, file in sorted(self.files.items()):
            content = None
            if file.name.state is SlotState.SEALED:
                assert file.shard is not None
                content = Content(
                    shard=file.shard, owner=file.owner, digests=b"", held=file.held,
                    source=file.source,
                )  # fmt: skip
            state.slots[slot] = Slot(
                name=file.name, length_bytes=file.length_bytes, content=content,
                element=file.element,
            )  # fmt: skip
        state.next_slot = 1 + max((int(slot[1:]) for slot in self.files), default=0)
        state.now_s = self.world.now_s
        self.shell = Shell(
            state=state, arena=self, performer=self, clock=lambda: self.world.now_s
        )  # fmt: skip
        self.shell.on_event = self._say
        self.shell.on_inventory = self._changed
        self.service = AgentService(self.shell, self, None)
        self._scan(self.life)
        self._report_in(0.0)

    def kill(self) -> None:
        """The agent's process dies; what it was doing is not done."""
        self.shell = self.service = None
        self.life += 1

    def stop(self) -> None:
        """The agent ends as it should: its last inventory says that it leaves."""
        item = self._inventory(leaving=True)
        self.fleet.bring(
            self.name,
            lambda metadata, answer: metadata.report(item, answer),
            lambda _: lambda: None,
            lambda _: None,
        )
        self.kill()

    def lose(self) -> None:
        """The machine is gone with its memory."""
        self.kill()
        self.there = False
        self.files.clear()
        self.locks.clear()
        self.ghosts.destroyed()

    def alive(self, life: int) -> bool:
        return self.shell is not None and self.life == life

    def _later(self, delay_s: float, do: Do) -> None:
        """Have this life's agent do something, unless it is dead by then."""
        life = self.life
        self.world.later(delay_s, lambda: do() if self.alive(life) else None, self.name)

    def soon(self, most_s: float, do: Do) -> None:
        self._later(self.world.rng.uniform(0.0, most_s), do)

    def _wall_ns(self) -> int:
        return int((self.world.now_s + self.clock_off_s) * 1e9)

    # -- the machine ---------------------------------------------------------------------------

    def feed(self, event: ev.AgentEvent) -> None:
        """Let the agent know, and begin what it decides."""
        assert self.shell is not None
        self.shell.dispatch(event)
        self._tell()

    def _changed(self, pressing: bool) -> None:
        self._report_in(COALESCE_S if pressing else PROGRESS_S)

    def _say(self, event: Event) -> None:
        self.world.say(f"{self.name}: {event.kind}: {event.message[:110]}")

    def _tell(self) -> None:
        """Tell ranks what has changed for them; each call that feeds the machine ends with it."""
        assert self.shell is not None
        for session in self.shell.state.sessions:
            view = self.shell.view_of(session)
            if view is not None and view != self._told.get(session):
                self._told[session] = view
                self.on_view(session, view)

    # -- what the shell has of an arena and of hands -------------------------------------------

    def names(self) -> dict[str, SlotName]:
        """See ``Arena.names``."""
        return {slot: file.name for slot, file in self.files.items()}

    def session_alive(self, session: str) -> bool:
        """See ``Arena.session_alive``."""
        return session in self.locks

    def forget_session(self, session: str) -> None:
        """See ``Arena.forget_session``: nothing is left of a lock that went."""

    def serve(self, key: str, slot: Slot) -> None:
        """See ``Performer.serve``: whoever fetches looks at the file."""

    def begin(self, action: ev.Action, tell: Callable[[ev.AgentEvent], None]) -> None:
        """See ``Performer.begin``."""
        if isinstance(action, ev.RenameSlot):
            self._rename(action.old, action.new)
        elif isinstance(action, ev.Quarantine):
            file = self.file(action.name)
            if file:
                file.held = HeldState.QUARANTINED
                self.ghosts.moved = True
        elif isinstance(action, ev.Fetch):
            self.ghosts.fetched(self, action)
            Fetch(self, action).begin()
        elif isinstance(action, ev.AskHold):
            self._ask(action)
        elif isinstance(action, ev.MakeElement):
            parity.make(self, action)
        elif isinstance(action, ev.PaceFetches):
            pass  # a fetch takes its time here with a rate or without
        else:
            self.soon(WORK_S_MAX, lambda: self._work(action))

    def make_partial(self, name: SlotName, length_bytes: int, shard: Shard, data: bytes) -> bool:
        """Make the file of a partial slot; False: there is no room."""
        if self.used_bytes + length_bytes > self.room_bytes:
            return False
        self.files[name.slot] = File(name, length_bytes, data=data, shard=shard)
        return True

    def file(self, name: SlotName) -> File | None:
        file = self.files.get(name.slot)
        return file if file and file.name == name else None

    def _rename(self, old: SlotName, new: SlotName) -> None:
        file = self.file(old)
        if file is None:
            return
        assert self.state is not None
        if old.state is SlotState.SEALED and file.shard is not None:
            others = [f for f in self.files.values() if f is not file and f.shard == file.shard]
            if self.state.lost and not others:
                self.ghosts.replaced(self.name, file.shard.id.checkpoint)
        file.name = new
        if new.state in (SlotState.FREE, SlotState.WRITING):
            file.shard, file.key, file.flipped, file.element = None, None, False, None
        self.ghosts.moved = True

    def _work(self, action: ev.Action) -> None:
        if isinstance(action, ev.CreateSlot):
            if self.used_bytes + action.length_bytes > self.room_bytes:
                self.feed(ev.SlotRefused(action.name.slot, "no space left"))
                return
            self.files[action.name.slot] = File(action.name, action.length_bytes)
            self.ghosts.moved = True
            self.feed(ev.SlotCreated(action.name.slot))
            return
        if isinstance(action, ev.VerifyElement):
            file = self.file(action.name)
            self.feed(ev.ElementVerified(action.name, file is not None and intact(file)))
            return
        assert isinstance(action, ev.DropSlot | ev.SealSlot | ev.VerifySlot | ev.ReclaimSlot)
        file = self.file(action.name)
        if isinstance(action, ev.DropSlot):
            if file:
                del self.files[action.name.slot]
        elif isinstance(action, ev.SealSlot):
            self.feed(self._seal(action, file))
        elif isinstance(action, ev.VerifySlot):
            good = file is not None and intact(file)
            self.feed(ev.SlotVerified(action.name, good, action.decision))
        else:
            self.feed(self._reclaim(action, file))

    def _seal(self, action: ev.SealSlot, file: File | None) -> ev.AgentEvent:
        if file is None or file.key is None:
            return ev.SealFailed(action.name, "not a segment")
        if file.holder is not None:
            return ev.SealBlocked(action.name)
        key = file.key
        if action.expected and action.expected != (key.run, key.generation, key.rank):
            return ev.SealFailed(action.name, f"{key.key} is not of {action.expected}")
        file.shard = describe(key, file.world_size, file.data)
        self.sealed(file, self.name, "memory")
        return ev.SlotSealed(action.name, Content(shard=file.shard, owner=self.name, digests=b""))

    def sealed(self, file: File, owner: str, source: str) -> None:
        assert file.shard is not None
        file.name, file.owner, file.source = file.name.to(SlotState.SEALED), owner, source
        file.held, file.flipped, file.since_s = HeldState.SEALED, False, self.world.now_s
        self.ghosts.seal(self.name, file.shard)

    def summed(self, file: File, held: HeldSum) -> None:
        """Note that a file holds an element now."""
        file.name, file.element = file.name.to(SlotState.ELEMENT), held
        file.flipped, file.since_s = False, self.world.now_s
        self.ghosts.sum_up(self.name, held)

    def _reclaim(self, action: ev.ReclaimSlot, file: File | None) -> ev.AgentEvent:
        if file is None:
            return ev.WorkBlocked(action.name)
        if file.holder is not None:
            if action.replace:
                del self.files[action.name.slot]
                return ev.Reclaimed(action.name, replaced=True)
            return ev.WorkBlocked(action.name)
        file.name = file.name.to(SlotState.FREE)
        file.shard, file.key = None, None
        return ev.Reclaimed(action.name, replaced=False)

    # -- other agents --------------------------------------------------------------------------

    def _ask(self, action: ev.AskHold) -> None:
        life, done = self.life, False

        def then(refused: str) -> None:
            nonlocal done
            if not done and self.alive(life):
                done = True
                self.feed(ev.HoldAnswered(action.shard.id, action.peer, refused, refused))

        def answer(refused: str) -> None:
            self.world.later(0.001, lambda: then(refused), self.name)

        def hold() -> Do | None:
            peer = self.nodes[action.peer.node]
            if peer.state is None:
                return None
            peer.hold(action.shard, self.me, answer)
            return lambda: None

        self.world.call(self.name, action.peer.node, hold, lambda: then("unavailable"))
        self._later(HOLD_S_MAX, lambda: then("unavailable"))

    def hold(self, shard: Shard, source: Peer, then: Callable[[str], None]) -> None:
        """Fetch and hold a copy; ``then`` hears "" once it is here, or why not."""
        assert self.service is not None
        try:
            self.service.begin_hold(
                shard, source, lambda reason: then("unavailable" if reason else "")
            )
        except CheckpointError as error:
            then(error.kind)
        self._tell()

    # -- ranks ---------------------------------------------------------------------------------

    def _scan(self, life: int) -> None:
        if not self.alive(life):
            return
        assert self.shell is not None
        self.shell.turn()
        self._tell()
        self.world.later(SCAN_S, lambda: self._scan(life), self.name)

    def update(self, update: SessionUpdate) -> bool:
        """Take a rank's news; False: its session is not open here."""
        if self.service is None:
            return False
        try:
            self.service.update(replace(update, report=checked(update.report)))
        except NotFoundError:
            return False
        self._tell()
        return True

    def told(self, session: str) -> SessionView | None:
        """Return what a session would be told now."""
        return self._told.get(session)

    # -- metadata ------------------------------------------------------------------------------

    def _inventory(self, *, leaving: bool = False) -> Inventory:
        assert self.shell is not None
        self._sequence += 1
        return self.shell.inventory(
            incarnation=self._incarnation, sequence=self._sequence, leaving=leaving
        )

    def _report_in(self, delay_s: float) -> None:
        """Report then, unless one is due before."""
        due_s = self.world.now_s + delay_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._later(delay_s, self._report)

    def _report(self) -> None:
        if self._asking or self.world.now_s < self._due_s:
            return
        self._due_s = float("inf")
        self._asking = True
        life = self.life
        item = self._inventory()
        self.fleet.bring(
            self.name,
            lambda metadata, answer: metadata.report(item, answer),
            lambda view: lambda: self._accept(life, view),
            lambda _: self._unheard(life),
        )

    def _accept(self, life: int, view: NodeView) -> None:
        if not self.alive(life):
            return
        self._asking, self._failures = False, 0
        if view.incarnation_min > self._incarnation:
            self._incarnation = max(view.incarnation_min, self._wall_ns())
            self._again(0.0)
            return
        self._again(HEARTBEAT_S)
        self._see(life, view)

    def _unheard(self, life: int) -> None:
        if not self.alive(life):
            return
        self._asking = False
        self._failures += 1
        self._again(REPORT_WAITS.wait_s(self._failures))
        self.feed(ev.MetadataLost("metadata does not answer"))

    def _again(self, delay_s: float) -> None:
        """Report after this, or at once if something has come up meanwhile."""
        if self._due_s <= self.world.now_s:
            self._due_s, delay_s = float("inf"), COALESCE_S
        self._report_in(delay_s)

    def hear(self) -> None:
        """Metadata has news: a watch is answered, if this agent is reached."""
        if self._watching:
            self._news = True
            return
        life = self.life

        def ask(metadata: Metadata) -> Do:
            self._news = False
            view = metadata.view(self.name)

            def answered() -> None:
                over()
                if not self._failures:
                    self._see(life, view)

            return answered

        def over() -> None:
            if self.alive(life):
                self._watching = False
                if self._news:
                    self._news = False
                    self._later(COALESCE_S, self.hear)

        if self.shell is not None and not self._failures:
            self._watching = True
            self.fleet.call(self.name, ask, lambda _: over())

    def _see(self, life: int, view: NodeView) -> None:
        if not self.alive(life):
            return
        for run in view.runs:
            self.ghosts.view_arrived(run.free_before)
        self.feed(ev.ViewArrived(view))
