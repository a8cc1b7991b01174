"""The residency machine under any order of events: a model performs its actions and checks.

Invariants after every event: the budget holds; no two sessions lease one slot; incarnations only
grow; what an open decision names, or a rank reads, is never freed (F44, P8).
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.said import agent_session, session_update, tcp

from holdfast.core.budget import Reservation
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.inventory import HeldState, Peer
from holdfast.core.node_view import NodeView, RunView, Want, WantReason
from holdfast.core.protection import Copies
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotState
from holdfast.core.sources import Memory
from holdfast_services.agent.domain import Content, State, Work, handle
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.fetch_wishes import wishes

LENGTH = 100
BUDGET = 8 * LENGTH
ME = Peer(node="a", rpc_address="a:1", endpoints=tcp("a:2"))
PEER = Peer(node="b", rpc_address="b:1", endpoints=tcp("b:2"))
RUN = RunId("r1")


def shard(step: int, generation: int = 1, rank: int = 0) -> Shard:
    return Shard(
        id=ShardId(RUN, Step(step), Generation(generation), Rank(rank)),
        job="job",
        world_size=2,
        plan_hash="p",
        length_bytes=LENGTH,
        root_digest=b"d" * 16,
    )


class Residency(RuleBasedStateMachine):
    """Feeds events; keeps the actions under way and answers them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State(me=ME, budget_bytes=BUDGET)
        self.pending: list[ev.Action] = []
        self.limited = True
        self.incarnations: dict[str, int] = {}
        self.now_s = 0.0
        self.generation = 1
        self.version = 0
        self.run_view = RunView(run=RUN, job="job", generation=1, world_size=2, ring=("a", "b"))
        self.wants: tuple[Want, ...] = ()

    def feed(self, event: ev.AgentEvent) -> None:
        before = self.state
        frozen = before.copy()
        self.state, actions = handle(before, event)
        assert frozen == before, "handle changed the state it was given"
        kept = self.named()
        rotten = event.name if isinstance(event, ev.SlotVerified) and not event.intact else None
        for action in actions:
            self.check(action)
            if isinstance(action, ev.RenameSlot) and action.old.state is SlotState.SEALED:
                gone = frozen.slots[action.old.slot].content
                good = gone is not None and gone.held is HeldState.SEALED
                good = good and action.old != rotten  # what was found just now counts
                lost = good and self.state.held(gone.shard.id) is None
                assert not (lost and gone.shard.id.checkpoint in kept), "freed what is restored"
            if isinstance(action, ev.RenameSlot):
                self.incarnations[action.new.slot] = action.new.incarnation
            elif isinstance(action, ev.PaceFetches):
                assert action.limited != self.limited, "said twice"
                self.limited = action.limited
            elif not isinstance(action, ev.Emit | ev.DropSlot | ev.Quarantine):
                self.pending.append(action)
        waits = any(wish.restore for wish in wishes(self.state))
        assert self.limited != waits, "a restore waits for fetches that keep a rate"

    def named(self) -> set[CheckpointId]:
        """What the last view's decision names while it is open, or ranks have still to load it."""
        views = self.state.view.runs if self.state.view else ()
        return {
            view.decision.checkpoint
            for view in views
            if view.decision and view.decision.checkpoint and self.is_open(view.decision)
        }

    def is_open(self, decision: Decision) -> bool:
        loading = (
            session.live and not session.loaded and session.generation == self.generation
            for session in self.state.sessions.values()
            if session.generation == decision.generation
        )
        confirmed = decision.state is DecisionState.CONFIRMED
        return decision.state is DecisionState.PROPOSED or (confirmed and any(loading))

    def check(self, action: ev.Action) -> None:
        if isinstance(action, ev.RenameSlot):
            assert action.new.incarnation >= self.incarnations.get(action.new.slot, 0)
            if action.old.state is SlotState.SEALED:
                assert action.new.state is SlotState.FREE
        if isinstance(action, ev.Fetch):
            assert self.state.held(action.shard.id) is None, "fetched although it is here"
        if isinstance(action, ev.AskHold):
            assert action.peer.node != ME.node

    @rule(rank=st.integers(0, 1), newer=st.booleans())
    def open_session(self, rank: int, newer: bool) -> None:
        self.generation += newer
        name = f"{self.generation}-{rank}"
        session = agent_session(
            id=name, job="job", run=RUN, generation=self.generation, rank=rank, world_size=2
        )
        self.feed(ev.SessionOpened(session))
        asked = Reservation(plan_hash="p", length_bytes=LENGTH, slots=2, restored_bytes=2 * LENGTH)
        self.feed(ev.Reserved(name, asked))

    @precondition(lambda self: self.state.sessions)
    @rule(data=st.data(), loaded=st.booleans())
    def session_news(self, data: st.DataObject, loaded: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.state.sessions)))
        if self.state.sessions[name].live:
            self.feed(ev.Updated(session_update(session=name, loaded=loaded)))

    @precondition(lambda self: self.state.sessions)
    @rule(data=st.data())
    def session_dies(self, data: st.DataObject) -> None:
        self.feed(ev.SessionEnded(data.draw(st.sampled_from(sorted(self.state.sessions)))))

    @rule(data=st.data())
    def a_writer_closes(self, data: st.DataObject) -> None:
        open_slots = [
            slot
            for slot in self.state.slots.values()
            if slot.name.state is SlotState.WRITING and slot.work is Work.NONE
        ]
        if open_slots:
            slot = data.draw(st.sampled_from(open_slots))
            self.feed(ev.SlotClosed(slot.name.to(SlotState.CLOSED)))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), good=st.booleans(), step=st.integers(1, 5))
    def work_ends(self, data: st.DataObject, good: bool, step: int) -> None:
        action = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.feed(self.answer(action, good, step))

    @rule(step=st.integers(1, 5))
    def all_work_ends_well(self, step: int) -> None:
        for _ in range(50):
            if not self.pending:
                return
            self.feed(self.answer(self.pending.pop(0), good=True, step=step))

    @rule(step=st.integers(1, 5))
    def a_rank_restores(self, step: int) -> None:
        """A proposal, all it takes, the confirmation: the rank may read from now on."""
        self.open_session(rank=0, newer=True)
        number = self.generation + 10
        self.metadata_decides(step, DecisionState.PROPOSED, number)
        self.all_work_ends_well(step)
        self.metadata_decides(step, DecisionState.CONFIRMED, number)

    def answer(  # noqa: PLR0911 - one line per kind of action
        self, action: ev.Action, good: bool, step: int
    ) -> ev.AgentEvent:
        match action:
            case ev.CreateSlot():
                name = action.name.slot
                return ev.SlotCreated(name) if good else ev.SlotRefused(name, "full")
            case ev.SealSlot():
                if not good:
                    return ev.SealBlocked(action.name)
                _, generation, rank = action.expected or (RUN, 1, 0)
                made = Content(shard=shard(step, generation, rank), owner="a", digests=b"d" * 16)
                return ev.SlotSealed(action.name, made)
            case ev.VerifySlot():
                return ev.SlotVerified(action.name, good, action.decision)
            case ev.ReclaimSlot():
                if good or not action.replace:
                    return ev.Reclaimed(action.name, replaced=False)
                return ev.Reclaimed(action.name, replaced=True)
            case ev.Fetch():
                if not good:
                    return ev.FetchFailed(action.name, action.shard.id, "no", (Memory("b"),))
                made = Content(shard=action.shard, owner="b", digests=b"d" * 16, source="peer")
                return ev.FetchDone(action.name, made)
            case ev.AskHold():
                kind = "" if good else "unavailable"
                return ev.HoldAnswered(action.shard.id, action.peer, kind)
        raise AssertionError(action)

    @rule(step=st.integers(1, 6), generation=st.integers(1, 3))
    def an_owner_asks(self, step: int, generation: int) -> None:
        self.feed(ev.HoldAsked(shard(step, generation, rank=1), PEER))

    @rule(step=st.integers(1, 6), state=st.sampled_from(DecisionState), number=st.integers(1, 4))
    def metadata_decides(self, step: int, state: DecisionState, number: int) -> None:
        wanted = shard(step, 1)
        self.run_view = replace(
            self.run_view,
            generation=self.generation,
            decision=Decision(
                number=number,
                state=state,
                generation=self.generation,
                checkpoint=CheckpointId(RUN, Step(step), Generation(1)),
                shards=(wanted,),
                shards_count=1,
            ),
        )
        self.wants = (Want(shard=wanted, sources=(Memory("b"),), reason=WantReason.RESTORE),)
        self.view()

    @rule(step=st.integers(1, 6), replicas=st.integers(0, 2))
    def metadata_commits(self, step: int, replicas: int) -> None:
        self.run_view = replace(
            self.run_view,
            free_before=CheckpointId(RUN, Step(step), Generation(1)),
            copies=Copies(replicas),
        )
        self.view()

    def view(self) -> None:
        self.version += 1
        self.feed(
            ev.ViewArrived(
                NodeView(
                    version=str(self.version),
                    nodes=(ME, PEER),
                    runs=(self.run_view,),
                    wants=self.wants,
                )
            )
        )

    @rule(wait_s=st.sampled_from([0.2, 10.0]))
    def time_passes(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.feed(ev.Tick(self.now_s))

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.state.used_bytes <= BUDGET

    @invariant()
    def no_session_has_more_than_its_quota(self) -> None:
        for session in self.state.sessions.values():
            leased = [
                slot
                for slot in self.state.slots.values()
                if slot.session == session.id
                and slot.name.state in (SlotState.WRITING, SlotState.CLOSED)
            ]
            assert len(leased) <= 2

    @invariant()
    def what_is_read_is_kept(self) -> None:
        """P3: a rank that was given segments finds them until it says that it has loaded."""
        for session in self.state.sessions.values():
            for key in session.reading:
                assert any(
                    slot.content and slot.content.shard.id == key
                    for slot in self.state.slots.values()
                )

    @invariant()
    def one_good_copy_per_shard(self) -> None:
        good = [
            slot.content.shard.id
            for slot in self.state.slots.values()
            if slot.content and slot.content.held is HeldState.SEALED and slot.work is Work.NONE
        ]
        assert len(good) == len(set(good))

    @invariant()
    def all_copies_are_those_that_are_found_one_by_one(self) -> None:
        copies = self.state.copies()
        named = (slot.content.shard.id for slot in self.state.slots.values() if slot.content)
        assert copies == {key: slot for key in named if (slot := self.state.held(key))}

    @invariant()
    def content_is_there_exactly_when_sealed(self) -> None:
        for slot in self.state.slots.values():
            assert (slot.content is not None) == (slot.name.state is SlotState.SEALED)


Residency.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestResidency = Residency.TestCase
