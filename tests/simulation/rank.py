"""A rank: the SDK's session as a small model, and the copies of its steps; what is saved: saves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.said import agent_session, registration, session_update
from tests.simulation.checks import Broken, intact
from tests.simulation.node import File, Node
from tests.simulation.plan import PARITY_GROUP, Plan, slots_of
from tests.simulation.saves import Saves
from tests.simulation.segments import BODY, JOB, LENGTH, Moment, plan_hash, segment
from tests.simulation.world import Do

from holdfast.core.attempts import Seat
from holdfast.core.budget import Reservation, saving_slots
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.needs import Needs, ShardNeed
from holdfast.core.persistence_rules import PersistRule, Retention
from holdfast.core.protection import Parity
from holdfast.core.session import RestoreView, SessionView
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.errors import CheckpointError
from holdfast.training.save_machine.events import Loaded
from holdfast_services.agent.domain import admit, slot_rules
from holdfast_services.agent.domain import events as ev
from holdfast_services.metadata.domain.attempts import Registration

if TYPE_CHECKING:
    from tests.simulation.job import Attempt

RETRY_S = 0.25
OPEN_S_MAX = 6.0
COPY_S_MAX = 0.04
FILLED_PART = 0.8
TELL_S = 0.0005
LOOK_S = 0.5
MISSED_COUNT_MAX = 4
WIDENED_PART = 0.15
WIDENED_S_MAX = 6.0
"""How long a rank waits for what it has named once its own segment did not suffice."""

Over = Callable[[Do], None]


def _persist(plan: Plan) -> PersistRule:
    return PersistRule(steps=plan.persist_steps)


class Process:
    """One rank of one attempt, until it dies; ``begun`` once training goes on."""

    def __init__(self, attempt: Attempt, rank: int, node: Node) -> None:
        self.attempt, self.rank, self.node = attempt, rank, node
        self.world, self.ghosts = attempt.job.world, attempt.job.ghosts
        self.session = f"{attempt.number}-{rank}"
        self.party = f"{node.name}/{self.session}"
        self.alive = True
        self.begun = False
        self.step = 0
        self.restored: CheckpointId | None = None
        self.copying: File | None = None
        self.filling: list[tuple[File, SlotName]] = []
        self._generation = 0
        self._run = ""
        self._view = SessionView(version="")
        self._opening = 0
        self.saves: Saves | None = None
        self._missed_count = 0
        self.needs: Needs | None = None
        node.locks.add(self.session)
        self._open()
        self._watch()

    def kill(self) -> None:
        """SIGKILL: locks go, a half-written slot stays as it is."""
        if self.alive:
            self.alive = False
            self.node.locks.discard(self.session)
            if self.copying is not None:
                self.copying.holder = None
            for file, _ in self.filling:
                file.holder = None

    def fail(self, why: str) -> None:
        """Raise: the launcher ends the attempt."""
        if self.alive:
            self.world.say(f"rank {self.rank} on {self.node.name} ends: {why}")
            self.kill()
            self.attempt.end()

    def later(self, delay_s: float, do: Do) -> None:
        """Have something happen in a while, if this process lives then."""
        self.world.later(delay_s, lambda: do() if self.alive else None, self.party)

    # -- the session ---------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the session with the agent, which registers the rank; again until it is there."""
        if not self.alive or self._opening:
            return
        self._opening = asked = 1 + int(self.world.now_s * 1e6)

        def over(then: Do, delay_s: float = TELL_S) -> None:
            def once() -> None:
                if self._opening == asked:
                    self._opening = 0
                    then()

            self.later(delay_s, once)

        def again() -> None:
            self.later(RETRY_S, self._open)

        def refused(error: CheckpointError) -> None:
            over(again if error.retryable else lambda: self._refused(error))

        self.world.later(TELL_S, lambda: self._register(over, refused), self.node.name)
        over(again, OPEN_S_MAX)

    def _open_anew(self) -> None:
        """Open the session with an agent that knows nothing of it: the leases were another's."""
        self._view = replace(self._view, leases=())
        self._open()

    def _register(self, over: Over, refused: Callable[[CheckpointError], None]) -> None:
        """At the agent: ask metadata for a seat."""
        agent = self.node.state
        if agent is None:
            return
        wish = self._wish(slot_rules.generation_seen(agent, JOB))

        def taken(seat: Seat) -> Do:
            self.ghosts.seat(wish.spec.nonce, seat.generation)
            return lambda: self._seated(seat, over)

        self.node.fleet.bring(
            self.node.name,
            lambda metadata, answer: metadata.register(wish, answer),
            taken,
            refused,
        )

    def _wish(self, generation_min: int) -> Registration:
        job, attempt = self.attempt.job, self.attempt
        plan = job.plan
        return registration(
            job=JOB, nonce=attempt.nonce, launcher=attempt.launcher, holder=attempt.launcher,
            takeover=attempt.takeover, rank=self.rank, world_size=attempt.world_size,
            node=self.node.name, replicas=plan.replicas, parity=_parity_of(plan),
            generation_min=generation_min, persist=_persist(plan),
            retention=Retention(last=plan.keep_last) if plan.keep_last else None,
            generation=self._generation if self.begun else 0, restored=self.restored,
            start=attempt.start, names_needs=plan.sharded, slots=plan.slots,
        )  # fmt: skip

    def _refused(self, error: CheckpointError) -> None:
        if self.begun and error.kind != "stale_generation":
            raise Broken(f"P4: rank {self.rank} trains and is refused: {error}")
        self.attempt.refused = True
        self.fail(f"{error.kind}: {error.message[:140]}")

    def _restored_count(self) -> int:
        """Return of how many shards its node needs room for; see ``state.capture.Estimate``."""
        plan, whole = self.attempt.job.plan, self.attempt.world_size
        part = self.attempt.on(self.node) * (plan.replicas + 2)
        return min(part, whole) if plan.sharded else whole

    def _seated(self, seat: Seat, over: Over) -> None:
        """At the agent: open the session and reserve; the rank hears of it."""
        agent = self.node.state
        if agent is None or not self.alive:
            return
        attempt = self.attempt
        session = agent_session(
            id=self.session, job=JOB, run=seat.run, generation=seat.generation, rank=self.rank,
            world_size=attempt.world_size, replicas=attempt.job.plan.replicas,
            parity=_parity_of(attempt.job.plan),
            nonce=attempt.nonce, local_world_size=attempt.on(self.node),
            names_needs=attempt.job.plan.sharded, persist=_persist(attempt.job.plan),
            slots=attempt.job.plan.slots,
        )  # fmt: skip
        self.node.feed(ev.SessionOpened(session))
        asked = Reservation(
            plan_hash=plan_hash(attempt.world_size), length_bytes=LENGTH,
            slots=slots_of(attempt.job.plan),
            restored_bytes=LENGTH * self._restored_count(), twins=attempt.job.plan.twins,
        )  # fmt: skip
        assert self.node.state is not None
        try:
            admit(self.node.state, self.node.state.sessions[self.session], asked)
        except CheckpointError as error:
            refusal = error
            over(lambda: self._refused(refusal))
            return
        self.node.feed(ev.Reserved(self.session, asked))
        over(lambda: self._opened(seat))

    def _opened(self, seat: Seat) -> None:
        if self.begun and seat.generation != self._generation:
            raise Broken(f"M1: generation {self._generation} trains, is told {seat.generation}")
        if self._run and seat.generation != self._generation:
            self.fail("the catalogue was lost and has numbered the attempt anew")
            return
        self._run, self._generation = seat.run, seat.generation
        if self.saves is None:
            self.saves = Saves(self, seat.run, seat.generation)
        self.tell()
        told = self.node.told(self.session)
        if told is not None:
            self.on_view(told)

    def _watch(self) -> None:
        """Every now and then: see an agent that has forgotten this session, say all again."""
        if not self._opening and self._run:
            self.tell()
        self.later(LOOK_S, self._watch)

    def tell(self, closed: tuple[str, ...] = ()) -> None:
        """Say all again to the agent, and which slots were closed."""
        saves = self.saves
        if saves is None:
            return
        update = session_update(
            session=self.session, step=self.step, step_s=self.attempt.step_s, loaded=self.begun,
            save_interval_s=self.attempt.step_s, saving=saves.state.steps_saving,
            sealed_before=saves.sealed_before,
            wants_slot=saves.wants_slot, abandoned=tuple(saves.abandoned), closed_slots=closed,
            notes=tuple(saves.notes), needs=self.needs,
        )  # fmt: skip

        def take() -> None:
            if self.node.state is not None and not self.node.update(update):
                self.later(TELL_S, self._open_anew)

        self.world.later(TELL_S, take, self.node.name)

    def on_view(self, view: SessionView) -> None:
        """Take the agent's news."""
        self.later(TELL_S, lambda: self._take(view))

    def _take(self, view: SessionView) -> None:
        if not self._run:
            return  # its agent has opened the session, and has not said so yet
        self._view = view
        if view.fenced:
            self.fail("fenced by a newer attempt")
            return
        if view.forgotten:
            self._open()
        assert self.saves is not None
        self.saves.learn(view)
        if not self.begun and view.restore is not None:
            self._restore(view)

    # -- restoring -----------------------------------------------------------------------------

    def _restore(self, view: SessionView) -> None:
        assert view.restore is not None
        decision = view.restore.decision
        if not view.restore.is_of(self._generation):
            self.fail("the catalogue was lost and has numbered the attempt twice")
        elif self._unnamed(decision):
            self.tell()
        elif decision.state is DecisionState.LOST:
            self.attempt.lost = not decision.refused
            self.attempt.refused = decision.refused
            self.fail(f"lost: {decision.reason[:150]}")
        elif decision.state is DecisionState.CONFIRMED and decision.fresh:
            self._begin(decision, 0)
        elif (
            decision.state is DecisionState.CONFIRMED
            and self._is_answered(view.restore)
            and not self._widened(decision)
        ):
            self._load(view, decision)

    def _is_answered(self, restore: RestoreView) -> bool:
        """Tell whether all is here, by what this rank named last."""
        return restore.ready and restore.needs == (self.needs.number if self.needs else 0)

    def _unnamed(self, decision: Decision) -> bool:
        """Name what this rank needs of what is proposed, if it has not; False: there is nothing."""
        chosen, size = decision.checkpoint, self.attempt.world_size
        if not self.attempt.job.plan.sharded or chosen is None or self._named() == chosen:
            return False
        saved = self.ghosts.world_sizes[chosen]
        parts = range(self.rank, saved, size) if self.rank < saved else (self.rank % saved,)
        ranges = (BODY,) if self.attempt.job.plan.ranged else ()
        self.needs = Needs(
            checkpoint=chosen, shards=tuple(ShardNeed(rank=one, ranges=ranges) for one in parts),
            number=self.needs.number + 1 if self.needs else 1,
        )  # fmt: skip
        self.ghosts.named[self.node.name, chosen].update(parts)
        return True

    def _widened(self, decision: Decision) -> bool:
        """Name all of it, as who finds that its own segment lacks a tensor; False: it does not."""
        needs, chosen, attempt = self.needs, decision.checkpoint, self.attempt
        if needs is None or chosen is None or needs.whole:
            return False
        seed = f"widened {attempt.job.plan.seed} {attempt.number} {self.rank}"
        if random.Random(seed).random() >= WIDENED_PART:
            return False
        self.needs = replace(needs, shards=(), whole=True, number=needs.number + 1)
        where = (self.node.name, chosen)
        self.ghosts.named[where].update(range(self.ghosts.world_sizes[chosen]))
        self.ghosts.widened.add(where)
        self.later(WIDENED_S_MAX, self._give_up)
        self.tell()
        return True

    def _give_up(self) -> None:
        if not self.begun:
            self.fail("the others' segments did not come")

    def _named(self) -> CheckpointId | None:
        return self.needs.checkpoint if self.needs else None

    def needed(self, key: CheckpointId) -> set[int]:
        """Return whose shards of a checkpoint this rank has to have before it begins."""
        if not self.attempt.job.plan.sharded or (self.needs and self.needs.whole):
            return set(range(self.ghosts.world_sizes[key]))
        return {need.rank for need in self.needs.shards} if self.needs else set()

    def _load(self, view: SessionView, decision: Decision) -> None:
        assert view.restore is not None
        found: dict[int, bytes] = {}
        for segment_ in view.restore.segments:
            file = self.node.files.get(segment_.file_name.split(".")[0])
            if file is None or file.name.file_name != segment_.file_name:
                return  # the agent is another one by now: its view comes
            if segment_.ranges:
                if file.shard != segment_.shard or BODY not in segment_.ranges:
                    raise Broken(f"P3: {segment_.file_name} lacks bytes that are loaded")
                found[int(segment_.shard.id.rank)] = file.data
                continue
            if file.shard != segment_.shard or not (intact(file) or file.flipped):
                raise Broken(f"P3: {segment_.file_name} is loaded with other bytes than sealed")
            if not intact(file):
                self.fail("the bytes turned out bad while they were loaded")
                return
            found[int(segment_.shard.id.rank)] = file.data
        assert decision.checkpoint is not None
        lineage, step = self.ghosts.load(decision, found, self.needed(decision.checkpoint))
        self.attempt.come_from(lineage, step)
        self._begin(decision, step)

    def _begin(self, decision: Decision, step: int) -> None:
        self.begun, self.step = True, step
        self.restored = None if decision.fresh else decision.checkpoint
        self.ghosts.begin(self.attempt.nonce, decision)
        if self.restored is not None:
            assert self.saves is not None
            self.saves.handle(Loaded(int(self.restored.step), int(self.restored.generation)))
        self.world.say(f"rank {self.rank} on {self.node.name} begins after step {step} "
                       f"(generation {self._generation})")  # fmt: skip
        self.tell()
        self.attempt.try_step()

    # -- saving --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether training waits for a slot or a copy."""
        return self.copying is not None or (self.saves is not None and self.saves.busy)

    def stepped(self, step: int, *, save: bool) -> None:
        """A step of training is done."""
        assert self.saves is not None
        if self.saves.state.owed is not None:
            self._miss()
        self.step = step
        self.saves.stepped(step, save=save)
        self.tell()

    def _miss(self) -> None:
        """X0: while metadata is out saves go on, in the slots of what nobody committed."""
        state = self.node.state
        able = self.node.room_bytes and not self._view.fenced
        able = able and not self.world.frozen(self.node.name)
        out = able and state is not None and state.lost and self.session in state.sessions
        out = out and not self._full()
        self._missed_count = self._missed_count + 1 if out else 0
        if self._missed_count > MISSED_COUNT_MAX:
            raise Broken(f"P5: while metadata is out rank {self.rank} saves nothing any more")

    def _full(self) -> bool:
        """4.7: its slots have commits that its agent was told of, and no budget is left.

        Not all agents know of them, so none may go before metadata is back.
        """
        node = self.node
        files = [file for file in node.files.values() if file.name.state is not SlotState.FREE]
        assert node.state is not None
        mine = {
            file.shard.id for file in files
            if file.shard is not None and file.owner == node.name
            and file.name.state is SlotState.SEALED and file.shard.id.rank == self.rank
        }  # fmt: skip
        kept = [key for key in mine if slot_rules.heard(node.state, key)]
        plan, view = self.attempt.job.plan, node.state.run(self._run)
        mine -= {*(view.drained if view else ())}
        kept = [key for key in kept if key in mine]
        slots = saving_slots(slots_of(plan), persist=bool(plan.persist_steps))
        full = sum(file.length_bytes for file in files) + LENGTH > node.budget_bytes
        return full and len(kept) == len(mine) >= slots

    def free_slot(self) -> tuple[File, SlotName] | None:
        """Return a leased slot that nobody writes."""
        for lease in self._view.leases:
            name = SlotName(lease.slot, lease.incarnation, SlotState.WRITING)
            file = self.node.files.get(lease.slot)
            if file is not None and file.name == name and file.holder is None:
                return file, name
        return None

    def copy_into(self, file: File, name: SlotName, step: int) -> None:
        """Begin to copy ``step`` into a slot."""
        file.holder, file.data, file.key, self.copying = self, b"half-written", None, file
        self._begin_to_fill()
        wait_s = self.world.rng.uniform(0, COPY_S_MAX)
        self.later(wait_s, lambda: self._copied(step, file))

    def _copied(self, step: int, file: File) -> None:
        assert self.saves is not None
        self.copying = None
        file.holder = None
        self._end_filling()
        self.saves.copied(step)
        self.tell()
        self.attempt.try_step()

    def _begin_to_fill(self) -> None:
        """Begin to fill the slots that were lent to it for copies; now and then it has no time."""
        for lease in self._view.twins:
            name = SlotName(lease.slot, lease.incarnation, SlotState.WRITING)
            file = self.node.files.get(lease.slot)
            there = file is not None and file.name == name and file.holder is None
            if file is not None and there and self.world.rng.random() < FILLED_PART:
                file.holder, file.data, file.key = self, b"filled in", None
                self.filling.append((file, name))

    def _end_filling(self) -> None:
        filling, self.filling = self.filling, []
        for file, name in filling:
            file.holder = None
            if self.node.files.get(name.slot) is file and file.name == name:
                file.name = name.to(SlotState.CLOSED)

    def close(
        self, step: int, file: File, name: SlotName, parent: tuple[int, int] | None
    ) -> SlotName | None:
        """Write the last bytes and rename; S2: nothing is written afterwards. None: it is gone."""
        if self.node.files.get(name.slot) is not file or file.name != name:
            return None
        key = ShardId(RunId(self._run), Step(step), Generation(self._generation), Rank(self.rank))
        size = self.attempt.world_size
        moment = Moment(self.attempt.number, step, self.rank)
        file.data, file.key = segment(key, size, moment, parent), key
        file.world_size = size
        file.name = name.to(SlotState.CLOSED)
        self.ghosts.close(key, size, self.attempt.number)
        self._missed_count = 0
        return file.name


def _parity_of(plan: Plan) -> Parity | None:
    return Parity(PARITY_GROUP, plan.parity) if plan.parity else None
