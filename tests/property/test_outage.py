"""Reports and answers that are lost in any order never leave a run without a whole checkpoint.

Agents' machine and catalogue's rules together: the freeing rule of 4.7 against the replacing one.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.outage.cluster import Cluster

from holdfast_services.agent.domain import events as ev

ROUNDS = 6
"""Of reports, after which all copies that have room are made and known to be."""


class Outage(RuleBasedStateMachine):
    """Two ranks save in step with each other; each message to metadata may be lost."""

    @initialize(
        replicas=st.sampled_from([0, 1]), slots=st.sampled_from([2, 3]), spare=st.integers(0, 2)
    )
    def begin(self, replicas: int, slots: int, spare: int) -> None:
        self.cluster = Cluster("a", "b", replicas=replicas, slots=slots, spare=spare)
        self.cluster.commit(1)
        self.done = {"a": 1, "b": 1}

    @rule(name=st.sampled_from(["a", "b"]))
    def save(self, name: str) -> None:
        """A rank goes on unless it is a step ahead: they meet in each step's all-reduce."""
        if self.done[name] == min(self.done.values()):
            self.done[name] += 1
            if not self.cluster.nodes[name].save(self.done[name]):
                self.cluster.nodes[name].abandon(self.done[name])

    @rule(name=st.sampled_from(["a", "b"]), heard=st.booleans(), answered=st.booleans())
    def report(self, name: str, heard: bool, answered: bool) -> None:
        self.cluster.report(name, heard=heard, answered=answered)

    @rule(name=st.sampled_from(["a", "b"]))
    def a_view_is_pushed(self, name: str) -> None:
        self.cluster.nodes[name].feed(ev.ViewArrived(self.cluster.view(name)))

    @rule(name=st.sampled_from(["a", "b"]))
    def metadata_is_out(self, name: str) -> None:
        self.cluster.nodes[name].feed(ev.MetadataLost("out"))

    @rule()
    def all_is_well(self) -> None:
        """With every message delivered the newest whole step is kept, and saves find slots."""
        if len(set(self.done.values())) > 1:
            self.save(min(self.done, key=self.done.__getitem__))
        for _ in range(ROUNDS):
            self.cluster.report()
            for node in self.cluster.nodes.values():
                node.feed(ev.Tick(node.state.now_s + 6.0))
        whole = {int(key.step) for key in self.cluster.whole()}
        assert self.cluster.kept == max(whole)
        last = max(self.done.values()) + 1
        self.done = dict.fromkeys(self.done, last)
        assert all(node.save(last) for node in self.cluster.nodes.values())

    @invariant()
    def a_checkpoint_is_whole_and_none_older_than_what_is_kept(self) -> None:
        """P5: what lets older slots go is itself there, on every rank."""
        whole = {int(key.step) for key in self.cluster.whole()}
        assert self.cluster.kept in whole


Outage.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestOutage = Outage.TestCase
