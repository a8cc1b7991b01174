"""A round that ends after a last step, under any order of steps, saves, deaths, joins and news.

The decisions of the launch and of its run are the real ones; a model of the ranks goes with them:
they step together, as ranks with collectives do, hear late or never, save or fail to, and wait.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.metadata.conftest import Cluster as Catalogue
from tests.unit.metadata.launchers import Cluster as Launches

from holdfast.core.announcements import Announcement
from holdfast.core.attempts import named_nonce
from holdfast.core.decision import DecisionState
from holdfast.core.rounds import RESTARTS_MAX
from holdfast_services.metadata.domain import round_end, rounds
from holdfast_services.metadata.domain.launch import EndReason
from holdfast_services.metadata.domain.rounds import EndAsked, Gone, Tick
from holdfast_services.metadata.domain.save_announcement import (
    LAST_AGAIN_S,
    announce_last,
    take_back,
)

NODES = ("aa", "bb", "cc")
TURN_S = 5.0
TURNS_MAX = 60
SETTLED_TURNS = int(LAST_AGAIN_S / TURN_S) + 2
"""In peace all is well for so long, by when what was only put off has come."""


@dataclass
class Rank:
    """A rank on a node: what it did, what it heard, and for what it waits."""

    number: int
    step: int
    heard: Announcement | None = None
    answered: int = 0
    waits_at: Announcement | None = None
    saved: set[int] = field(default_factory=set)


class RoundEnds(RuleBasedStateMachine):
    """One launch of one job on up to three nodes, a rank on each."""

    @initialize(
        first=st.lists(st.sampled_from(NODES), unique=True, min_size=1, max_size=2),
        interval_s=st.sampled_from([0.0, 1.0]),
        steps=st.sampled_from([0, 1, 3]),
    )
    def begin(self, first, interval_s, steps):
        self.launches = Launches(
            nodes_min=1, nodes_max=3, shrink_after_s=0.0, restarts_max=RESTARTS_MAX
        )
        self.catalogue = Catalogue()
        self.interval_s, self.every = interval_s, steps
        self.ranks = {}
        self.nonce = ""
        self.past = []
        self.late = False
        for node in first:
            self.join(node)

    # ---------------------------------------------------------------------------- the launch

    def join(self, node):
        self.launches.now_s += 0.01  # a launch is named by who begins it, and when
        self.launches.say(node, ranks=1, port=7000 + self.launches.launch.number)
        self.follow()

    def follow(self):
        """Have launchers kill the ranks of an old round, and start those of a new one."""
        launch = self.launches.launch
        if not launch.on:
            self.ranks = {}
        if not launch.on or launch.nonce == self.nonce:
            return
        self.nonce, self.late = launch.nonce, False
        nodes = [member.node for member in launch.members]
        for node in nodes:
            self.launches.say(node, round=launch.nonce, finished=False, failure=None)
        for machine in self.catalogue.machines.values():
            machine.ranks.clear()
        for name in self.catalogue.machines:
            self.catalogue.report(name)
        self.catalogue.join(*nodes)
        self.catalogue.launch(named_nonce(launch.nonce), *nodes, launcher="L", replicas=0)
        for _ in range(4):
            decision = self.catalogue.run.decision
            if decision.state is DecisionState.PROPOSED:
                self.catalogue.ready(*((node, rank) for rank, node in enumerate(nodes)))
            elif decision.state is DecisionState.PENDING:
                self.catalogue.later(11.0)
                self.catalogue.report(*nodes)
        assert decision.state is DecisionState.CONFIRMED, decision
        step = decision.checkpoint.step if decision.checkpoint else 0
        self.ranks = {node: Rank(number, step) for number, node in enumerate(nodes)}
        for node in nodes:
            self.say(node)

    @rule(node=st.sampled_from(NODES))
    def come(self, node):
        if self.launches.launch.launcher(node * 16) is None:
            self.join(node)

    @rule(node=st.sampled_from(NODES))
    def go(self, node):
        """A launcher is killed, with its ranks if it has some."""
        if self.launches.launch.launcher(node * 16):
            self.launches.feed(Gone(frozenset({node * 16})))
            self.launches.reports.pop(node)
            self.follow()

    @rule(node=st.sampled_from(NODES))
    def fail(self, node):
        if node in self.ranks:
            self.launches.fail(node, "killed by SIGKILL", outside=True, step=self.ranks[node].step)
            self.launches.tick(31.0)
            self.follow()

    @rule(copied=st.booleans())
    def ask(self, copied):
        self.launches.feed(EndAsked(reason=EndReason.RESCALE, copied=copied))

    @rule(seconds=st.sampled_from([0.5, 0.5, 30.0, LAST_AGAIN_S]))
    def tick(self, seconds):
        """Do what the clock does: runs, then launches."""
        self.launches.now_s += seconds
        self.catalogue.now_s += seconds
        self.catalogue.report(*self.catalogue.machines)
        launch, catalogue = self.launches.launch, self.catalogue
        if not (launch.on and launch.end):
            self.launches.tick()
            self.follow()
            return
        wanted = rounds.end_wanted(launch)
        last = announce_last if wanted else None
        before = catalogue.run
        if last:
            asked_at_s = launch.end.asked_at_s
            catalogue.run = last(before, catalogue.nodes, catalogue.now_s, asked_at_s).run
        else:
            catalogue.run = take_back(before)
        runs = [before]
        safe = wanted and round_end.is_safe(runs, catalogue.nodes, launch.end, catalogue.now_s)
        if safe:
            self.check_nothing_is_lost()
        self.launches.feed(Tick(saved=safe, taken_back=not wanted))
        assert not safe or self.launches.launch.number > launch.number, "the next begins at once"
        self.follow()

    def check_nothing_is_lost(self):
        """The step that is restored is the last one that a rank has done, if one waits there."""
        run = self.catalogue.run
        newest = max(row.id.step for row in run.checkpoints if row.id.generation == run.generation)
        if any(rank.waits_at for rank in self.ranks.values()) and not self.late:
            assert newest == max(rank.step for rank in self.ranks.values())

    # ----------------------------------------------------------------------------- the ranks

    @rule(node=st.sampled_from(NODES), fails=st.sampled_from([False, False, False, True]))
    def step(self, node, fails):
        rank = self.ranks.get(node)
        if rank is None or rank.waits_at or not self.all_take_part(rank):
            return
        rank.step += 1
        announced = rank.heard
        due = self.every and rank.step % self.every == 0
        if announced and announced.step > rank.answered and announced.step <= rank.step:
            rank.answered = announced.step
            if announced.step < rank.step and announced.step not in rank.saved:
                self.catalogue.abandon(node, announced.step, self.generation, "heard too late")
            elif announced.step == rank.step:
                due = True
                rank.waits_at = announced if announced.reason.ends_round and not fails else None
        if due and fails:
            self.catalogue.abandon(node, rank.step, self.generation, "no memory")
        elif due:
            rank.saved.add(rank.step)
            self.catalogue.hold(
                node, rank.step, self.generation, rank.number, world=len(self.ranks)
            )

    def all_take_part(self, rank):
        """Tell whether all others are in the step, or past it: they compute it together."""
        others = [other for other in self.ranks.values() if other is not rank]
        return all(o.step > rank.step or (o.step == rank.step and not o.waits_at) for o in others)

    @property
    def generation(self):
        return self.catalogue.run.generation

    @rule(node=st.sampled_from(NODES))
    def say(self, node):
        """An agent reports what its rank did; the report may come a second time later."""
        if node in self.ranks:
            self.note(node)
            self.catalogue.report(node)
            self.past.append(self.catalogue.inventory(node))

    def note(self, node):
        """An agent sees what its rank did; it says so when it reports next."""
        rank = self.ranks.get(node)
        if rank:
            self.catalogue.status(
                node, rank.number, step=rank.step, step_s=0.5, loaded=True,
                save_interval_s=self.interval_s,
            )  # fmt: skip

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def repeat(self, data):
        self.catalogue.deliver(data.draw(st.sampled_from(self.past)))

    @rule(node=st.sampled_from(NODES))
    def hear(self, node):
        """A rank sees its agent's view; who waits goes on if that says so."""
        rank, run = self.ranks.get(node), self.catalogue.run
        if rank is None:
            return
        rank.heard = run.announcement or rank.heard
        dropped = {item.step for item in run.abandoned if item.generation == run.generation}
        if rank.waits_at and (rank.heard != rank.waits_at or rank.waits_at.step in dropped):
            rank.waits_at = None

    @rule(node=st.sampled_from(NODES))
    def wait_is_over(self, node):
        """What bounds the wait of a rank, whatever happens."""
        rank = self.ranks.get(node)
        if rank and rank.waits_at:
            rank.waits_at, self.late = None, True

    # ------------------------------------------------------------------------ what must hold

    @invariant()
    def a_wish_is_of_a_round_that_is_on(self):
        launch = self.launches.launch
        assert launch.end is None or launch.on

    @invariant()
    def what_was_committed_was_not_given_up(self):
        run = self.catalogue.run
        assert not any(run.dropped(row.id) for row in run.checkpoints)

    def teardown(self):
        """In peace who waits is taken in, or all go on: nobody waits for ever."""
        if not hasattr(self, "launches") or not self.launches.launch.launchers:
            return
        self.every = self.every or 2
        settled, turns = 0, 0
        while settled < SETTLED_TURNS:
            for node in NODES:
                self.hear(node)
            for node in NODES:
                self.step(node, fails=False)
                self.note(node)
            self.tick(TURN_S)
            launch = self.launches.launch
            all_take_part = launch.on and len(launch.members) == len(launch.launchers)
            settled = settled + 1 if all_take_part and launch.end is None else 0
            turns += 1
            assert turns < TURNS_MAX, (launch.on, launch.members, launch.launchers, launch.end)
        before = {node: rank.step for node, rank in self.ranks.items()}
        for _ in range(3):
            for node in NODES:
                self.hear(node)
                self.step(node, fails=False)
        assert all(rank.step > before[node] for node, rank in self.ranks.items())


TestRoundEnds = RoundEnds.TestCase
TestRoundEnds.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
