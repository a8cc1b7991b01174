"""A cluster on paper: the agents' machine and the catalogue's rules, and a wire that may fail.

Every node hosts one rank. Work that an agent begins ends at once; reports go where a test says.
"""

from __future__ import annotations

from tests.said import agent_session, registration, session_update, tcp

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.budget import Reservation, memory_need
from holdfast.core.decision import Start
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import Peer
from holdfast.core.node_view import NodeView
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.protection import Copies
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotState
from holdfast.errors import CheckpointError
from holdfast_services.agent.domain import (
    Content,
    State,
    handle,
    inventory,
    making_room,
)
from holdfast_services.agent.domain import events as ev
from holdfast_services.metadata.domain.advance_run import advance
from holdfast_services.metadata.domain.attempts import register
from holdfast_services.metadata.domain.commit_rule import free_before
from holdfast_services.metadata.domain.model import Limits, Run
from holdfast_services.metadata.domain.model import Node as Row
from holdfast_services.metadata.domain.node_view import node_view, world

RUN = RunId("0123456789ab")
JOB = "job"
LENGTH = 100
LIMITS = Limits(node_lease_s=5.0, decide_wait_s=10.0)


class Node:
    """One agent with its rank; ``others`` are reached directly, metadata only by the cluster."""

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        replicas: int,
        slots: int,
        spare: int,
        persist: PersistRule,
    ) -> None:
        me = Peer(node=name, rpc_address=f"{name}:1", endpoints=tcp(f"{name}:2"))
        need = memory_need(
            own_bytes=LENGTH, restored_bytes=LENGTH, protection=Copies(replicas),
            nodes_count=world, slots=slots, persist=persist.on,
        )  # fmt: skip
        self.state = State(me=me, budget_bytes=need.total_bytes + spare * LENGTH)
        self.name, self.rank, self.world, self.replicas, self.slots = (
            name, rank, world, replicas, slots,
        )  # fmt: skip
        self.persist = persist
        self.others: dict[str, Node] = {}
        self.sequence = 0
        self.session = ""
        self.said: list[str] = []

    def open(self, generation: int, nonce: bytes) -> None:
        """A trainer of this generation begins."""
        self.session = f"{generation}-{self.rank}"
        session = agent_session(
            id=self.session, job=JOB, run=RUN, generation=generation, rank=self.rank,
            world_size=self.world, replicas=self.replicas, nonce=nonce, slots=self.slots,
            persist=self.persist,
        )  # fmt: skip
        self.feed(ev.SessionOpened(session))
        asked = Reservation(
            plan_hash="p", length_bytes=LENGTH, slots=self.slots, restored_bytes=LENGTH
        )
        self.feed(ev.Reserved(self.session, asked))

    def feed(self, event: ev.AgentEvent) -> None:
        """Let the agent know; what it begins ends at once and well, unless a peer says no."""
        waiting = [event]
        while waiting:
            self.state, actions = handle(self.state, waiting.pop(0))
            for action in actions:
                waiting += self.answers(action)

    def answers(self, action: ev.Action) -> list[ev.AgentEvent]:
        match action:
            case ev.CreateSlot():
                return [ev.SlotCreated(action.name.slot)]
            case ev.ReclaimSlot():
                return [ev.Reclaimed(action.name, replaced=False)]
            case ev.VerifySlot():
                return [ev.SlotVerified(action.name, intact=True, decision=action.decision)]
            case ev.AskHold():
                return [self.ask(action)]
            case ev.Fetch():
                return [self.fetch(action)]
            case ev.Emit():
                self.said.append(action.event.kind)
        return []

    def ask(self, action: ev.AskHold) -> ev.AgentEvent:
        peer = self.others.get(action.peer.node)
        if peer is None:
            return ev.HoldAnswered(action.shard.id, action.peer, "unavailable", "gone")
        if peer.state.held(action.shard.id) is None:
            try:
                making_room.check_holdable(peer.state, action.shard)
            except CheckpointError as error:
                return ev.HoldAnswered(action.shard.id, action.peer, error.kind, error.message)
        peer.feed(ev.HoldAsked(action.shard, self.state.me))
        there = peer.state.held(action.shard.id) is not None
        return ev.HoldAnswered(action.shard.id, action.peer, "" if there else "unavailable")

    def fetch(self, action: ev.Fetch) -> ev.AgentEvent:
        for source in action.sources:
            peer = self.others.get(source.node)
            if peer is not None and peer.state.held(action.shard.id):
                owner = action.owner or source.node
                return ev.FetchDone(
                    action.name, Content(shard=action.shard, owner=owner, digests=b"")
                )
        return ev.FetchFailed(action.name, action.shard.id, "nobody has it")

    def save(self, step: int) -> bool:
        """The rank saves ``step`` if it gets a slot; the wish stands until it got one."""
        if self.lease() is None:
            self.tell(step, wants_slot=step)
        slot = self.lease()
        if slot is None:
            return False
        self.tell(step, saving=(step,))
        name = slot.name.to(SlotState.CLOSED)
        self.feed(ev.SlotClosed(name))
        generation = self.state.sessions[self.session].generation
        self.feed(ev.SlotSealed(name, self.content(step, generation)))
        self.tell(step)
        return True

    def abandon(self, step: int) -> None:
        """The rank gives ``step`` up: it found no slot."""
        generation = self.state.sessions[self.session].generation
        given_up = AbandonedStep(run=RUN, step=step, generation=generation)
        self.tell(step, abandoned=(given_up,))

    def tell(self, step: int, **fields: object) -> None:
        self.feed(ev.Updated(session_update(session=self.session, step=step, **fields)))

    def lease(self):
        """An open slot of this rank's, or None."""
        return next(
            (
                slot
                for slot in self.state.slots.values()
                if slot.session == self.session and slot.name.state is SlotState.WRITING
            ),
            None,
        )

    def content(self, step: int, generation: int) -> Content:
        key = ShardId(RUN, Step(step), Generation(generation), Rank(self.rank))
        shard = Shard(
            id=key, job=JOB, world_size=self.world, plan_hash="p", length_bytes=LENGTH,
            root_digest=bytes([self.rank]) * 16,
        )  # fmt: skip
        return Content(shard=shard, owner=self.name, digests=b"")

    def held(self) -> set[ShardId]:
        return {slot.content.shard.id for slot in self.state.slots.values() if slot.content}

    def steps(self) -> set[int]:
        """Steps of this rank's own that lie here."""
        return {int(key.step) for key in self.held() if key.rank == self.rank}


class Cluster:
    """The catalogue and its nodes; a job with one rank per node trains from the start.

    ``spare`` slots fit on each node beside those that the job needs (P8).
    """

    def __init__(
        self,
        *names: str,
        replicas: int = 0,
        slots: int = 2,
        spare: int = 1,
        persist: PersistRule | None = None,
    ) -> None:
        self.now_s = 1000.0
        self.run = Run(id=RUN, job=JOB)
        self.rows: dict[str, Row] = {}
        self.replicas = replicas
        self.nodes = {
            name: Node(name, rank, len(names), replicas, slots, spare, persist or PersistRule())
            for rank, name in enumerate(names)
        }
        for node in self.nodes.values():
            node.others = {other.name: other for other in self.nodes.values() if other is not node}
        self.launch(b"first")

    def launch(self, nonce: bytes, start: Start | None = None) -> None:
        """An attempt begins on the nodes that are there, one rank each, and its restore ends."""
        for node in self.nodes.values():
            node.rank = list(self.nodes).index(node.name)
            node.world = len(self.nodes)
            wish = registration(
                job=JOB, nonce=nonce, launcher="L", holder="h", takeover=False, rank=node.rank,
                world_size=node.world, node=node.name, replicas=self.replicas,
                slots=node.slots, persist=node.persist, start=start,
            )  # fmt: skip
            known = self.run.generation if self.run.attempt and node.rank else None
            self.run = register(self.run, wish, known, self.now_s, LIMITS).run
        for node in self.nodes.values():
            node.open(self.run.generation, nonce)
        for _ in range(4):
            self.report()
        for node in self.nodes.values():
            node.tell(0, loaded=True)
        self.report()

    def settle_down(self, *, pauses_s: float = 0.0) -> None:
        """Have all report until nothing is on its way; each then rests for ``pauses_s``."""
        for _ in range(4):
            self.report()
            for node in self.nodes.values():
                if pauses_s:
                    node.feed(ev.Tick(node.state.now_s + pauses_s))

    def report(self, *names: str, heard: bool = True, answered: bool = True) -> None:
        """Nodes report in turn; a report or its answer may be lost on the way."""
        for name in names or tuple(self.nodes):
            node = self.nodes[name]
            node.sequence += 1
            item = inventory(node.state, incarnation=1, sequence=node.sequence)
            if heard:
                self.rows[name] = Row(
                    inventory=item, reported_at_s=self.now_s, lease_until_s=self.now_s + 5.0
                )
                self.settle()
            if heard and answered:
                node.feed(ev.ViewArrived(self.view(name)))
            else:
                node.feed(ev.MetadataLost("no answer"))

    def settle(self) -> None:
        self.run = advance(self.run, self.rows, self.now_s, LIMITS).run

    def view(self, name: str) -> NodeView:
        return node_view(world(self.rows, (self.run,), self.now_s, LIMITS), name)

    def commit(self, step: int) -> None:
        """All save ``step`` and every agent hears of it."""
        assert all(node.save(step) for node in self.nodes.values())
        for _ in range(3):
            self.report()
        assert self.kept == step

    def lose(self, name: str) -> None:
        """The node is gone with its memory."""
        del self.nodes[name]
        for node in self.nodes.values():
            node.others.pop(name, None)

    @property
    def kept(self) -> int | None:
        key = free_before(self.run)
        return int(key.step) if key else None

    def committed(self) -> set[int]:
        return {int(row.id.step) for row in self.run.checkpoints}

    def whole(self) -> set[CheckpointId]:
        """Checkpoints of which every shard lies sealed somewhere."""
        ranks: dict[CheckpointId, set[int]] = {}
        for key in set[ShardId]().union(*(node.held() for node in self.nodes.values())):
            ranks.setdefault(key.checkpoint, set()).add(key.rank)
        return {key for key, found in ranks.items() if len(found) == len(self.nodes)}


def replaced(cluster: Cluster, name: str, step: int) -> bool:
    """Tell whether the rank's session knows that ``step`` gave way to a later one."""
    node = cluster.nodes[name]
    return step in node.state.sessions[node.session].replaced
