"""Rounds under any order of reports, deaths, waits and late messages: what must always hold.

A model of the launchers goes with the decision: each keeps its last view, and does what that says.
"""

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.core.rounds import LauncherReport, LaunchView, RankFailure, Terms
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain import notices, round_view, rounds
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.rounds import Gone, Reported, Silent, Tick

LEASE_S = 3.0
NODES = ("n0", "n1", "n2", "n3")
PAUSE_S_MAX = 40.0


@dataclass
class Process:
    """A launcher: alive or not, what it last said, what it runs."""

    node: str
    report: LauncherReport
    view: LaunchView = field(default_factory=LaunchView)
    alive: bool = True
    sent: list[Reported] = field(default_factory=list)


def master(launch):
    return (launch.master_address, launch.master_port)


class Rounds(RuleBasedStateMachine):
    """Launchers on a few nodes, and the network between them and the decision."""

    @initialize(
        least=st.integers(1, 3),
        more=st.integers(0, 2),
        shrink_after_s=st.sampled_from([0.0, 5.0]),
        restarts_max=st.sampled_from([0, 2, 1000]),
    )
    def begin(self, least, more, shrink_after_s, restarts_max):
        self.now_s = 1000.0
        self.launch = Launch(job="gpt")
        self.terms = Terms(
            command="c", nodes_min=least, nodes_max=least + more,
            shrink_after_s=shrink_after_s, restarts_max=restarts_max,
        )  # fmt: skip
        self.processes = {}
        self.count = 0
        self.nonces = {}

    def feed(self, event):
        self.now_s += 0.01
        before = self.launch
        self.launch, _ = rounds.handle(before, event, now_s=self.now_s, lease_s=LEASE_S)
        if before.id == self.launch.id:
            assert self.launch.number >= before.number, "rounds only go forward"
            if self.launch.number > before.number:
                assert self.launch.number == before.number + 1
                assert self.launch.nonce not in self.nonces, "a nonce names one round"
                assert master(before) != master(self.launch), "old ranks would meet new ones"
                self.nonces[self.launch.nonce] = self.launch.members
                assert not notices.who_go(self.launch), "a round begins with nodes that stay"

    def say(self, process, **what):
        report = process.report
        process.report = replace(report, sequence=report.sequence + 1, **what)
        event = Reported(process.report, process.node, process.node)
        process.sent.append(event)
        try:
            self.feed(event)
        except AlreadyExistsError:
            process.view = LaunchView()
            return
        self.see(process)

    def see(self, process):
        """Ask, and do what the answer says, as a launcher does."""
        name = process.report.launcher
        view = round_view.view(self.launch, name, lease_s=LEASE_S)
        process.view = view
        place = view.place
        if view.port_taken == process.report.port:
            self.say(process, port=self.fresh_port())
        elif place and place.nonce != process.report.round:
            self.say(process, round=place.nonce, finished=False, failure=None)

    def fresh_port(self):
        self.count += 1
        return self.count

    def some(self, data, pick):
        """Return a process that ``pick`` allows, None: there is none."""
        names = sorted(name for name, process in self.processes.items() if pick(process))
        return self.processes[data.draw(st.sampled_from(names))] if names else None

    @rule(node=st.sampled_from(NODES), ranks=st.integers(1, 2))
    def start(self, node, ranks):
        if len(self.processes) > 12:
            return
        self.count += 1
        name = f"{self.count:016x}{0:016x}"
        report = LauncherReport(
            launcher=name, sequence=0, job="gpt", terms=self.terms, ranks=ranks,
            port=self.fresh_port(),
        )  # fmt: skip
        self.processes[name] = Process(node, report)
        self.say(self.processes[name])

    @rule(data=st.data())
    def look(self, data):
        process = self.some(data, lambda p: p.alive)
        if process:
            self.say(process)

    @rule(data=st.data(), outside=st.booleans(), of_peer=st.booleans(), step=st.integers(-1, 2))
    def fail(self, data, outside, of_peer, step):
        process = self.some(data, lambda p: p.alive and p.report.round and not p.report.finished)
        if process:
            failure = RankFailure(
                rank=0, code=1, reason="x", step=step, outside=outside, of_peer=of_peer
            )
            self.say(process, failure=failure)

    @rule(data=st.data())
    def finish(self, data):
        process = self.some(data, lambda p: p.alive and p.report.round and not p.report.failure)
        if process:
            self.say(process, finished=True)

    @rule(data=st.data())
    def stop(self, data):
        process = self.some(data, lambda p: p.alive)
        if process:
            self.say(process, stopping=True)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 5.0, 60.0]))
    def notice(self, data, seconds):
        """Its node will be taken away, or will not after all."""
        process = self.some(data, lambda p: p.alive)
        if process:
            self.say(process, goes_in_s=seconds)

    @rule(data=st.data())
    def leave(self, data):
        process = self.some(data, lambda p: p.alive)
        if process:
            process.alive = False
            self.say(process, left=True)

    @rule(data=st.data(), told=st.booleans())
    def die(self, data, told):
        """It is killed; its agent tells, or its lease will."""
        process = self.some(data, lambda p: p.alive)
        if process:
            process.alive = False
            if told:
                self.feed(Gone(frozenset({process.report.launcher})))

    @rule(data=st.data())
    def give_up(self, data):
        """A live one is taken for lost, as when its machine was stopped; it wakes up later."""
        process = self.some(data, lambda p: p.alive)
        if process:
            self.feed(Gone(frozenset({process.report.launcher})))

    @rule(data=st.data(), alive=st.booleans())
    def silence(self, data, alive):
        """A lease runs out: of one that is dead, or of one whose agent is away for a while."""
        process = self.some(data, lambda p: p.alive == alive)
        if process:
            self.feed(Silent(frozenset({process.report.launcher})))

    @rule(data=st.data())
    def repeat(self, data):
        """An old message arrives again, or late; who is known already is not moved by it."""
        process = self.some(data, lambda p: p.sent)
        if not process:
            return
        before = self.launch
        event = data.draw(st.sampled_from(process.sent))
        known = before.launcher(process.report.launcher)
        try:
            self.feed(event)
        except AlreadyExistsError:
            return
        if known and event.report.sequence <= known.sequence:
            heard = before.having(replace(known, silent_since_s=0.0))
            assert self.launch.number > before.number or self.launch == heard

    @rule(seconds=st.sampled_from([0.5, 3.0, 31.0]), saved=st.booleans())
    def wait(self, seconds, saved):
        self.now_s += seconds
        self.feed(Tick(saved=saved, late=notices.is_over(self.launch, self.now_s + 0.01)))

    @invariant()
    def a_round_has_what_it_needs(self):
        launch = self.launch
        takes_part = [member.launcher for member in launch.members]
        assert len(set(takes_part)) == len(takes_part)
        assert len({one.node for one in launch.launchers}) == len(launch.launchers)
        if launch.on:
            assert launch.terms.nodes_min <= len(takes_part) <= launch.terms.nodes_max
            assert set(takes_part) <= {one.id for one in launch.launchers}, (
                "nobody waits for the dead"
            )
            assert not launch.ending
            places = [launch.place(name) for name in takes_part]
            assert len({place.nonce for place in places}) == 1
            ranks = [
                rank
                for place, member in zip(places, launch.members, strict=True)
                for rank in range(place.first_rank, place.first_rank + member.ranks)
            ]
            assert ranks == list(range(places[0].world_size)), "each rank once"
        if launch.on and notices.who_go(launch) and not launch.stopping:
            assert launch.end, "it ends for who goes"
            stay = [o for o in launch.launchers if not (o.goes_at_s or o.stopping)]
            assert len(stay) >= launch.terms.nodes_min, "and the others go on"
        for one in launch.silent:
            assert launch.on or launch.stopping or launch.ending, "nobody waits for it"
            assert launch.takes_part(one.id)

    def teardown(self):
        """In peace a launch that is not over trains again, or waits for nodes that are missing."""
        if not hasattr(self, "launch"):
            return
        dead = {p.report.launcher for p in self.processes.values() if not p.alive}
        self.feed(Silent(frozenset(dead)))
        for process in self.processes.values():
            if process.alive:
                self.say(process)
        for _ in range(4):
            self.now_s += PAUSE_S_MAX
            self.feed(Tick())
            for process in self.processes.values():
                if process.alive:
                    self.say(process)
        launch = self.launch
        here = [one for one in launch.launchers if launch.available(one)]
        over = launch.ending or launch.stopping
        if not over and len(here) >= launch.terms.nodes_min:
            assert launch.on
        runs = {p.report.round for p in self.processes.values() if p.alive and p.view.place}
        assert len(runs) <= 1, "all ranks are of one round"


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
