"""Rounds of launches that the scheduler allocates, under any order of news: what must always hold.

As ``test_rounds``, with allocations that come in any order: a round is of exactly the newest that
could begin, with the ranks and the devices that it names, and in peace of the newest of all.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from tests.property.test_rounds import LEASE_S, NODES, PAUSE_S_MAX, Rounds

from holdfast.core.allocations import Allocation, Share
from holdfast.core.rounds import LaunchView
from holdfast.errors import StaleGenerationError
from holdfast_services.metadata.domain import allocated, round_view
from holdfast_services.metadata.domain.rounds import Allocated, Gone, Tick


class Allocations(Rounds):
    """Launchers on a few nodes, and somebody who says which of them take part."""

    def begin_allocated(self):
        if not hasattr(self, "puts"):
            self.puts = {}
            self.terms = replace(self.terms, allocated=True, nodes_min=1, nodes_max=len(NODES))

    @rule(nodes=st.sets(st.sampled_from(NODES)), ranks=st.integers(1, 3), least=st.integers(0, 3))
    def allocate(self, nodes, ranks, least):
        self.begin_allocated()
        number = len(self.puts) + 1
        shares = tuple(
            Share(node=node, ranks=ranks, devices=tuple(range(ranks))) for node in sorted(nodes)
        )
        self.puts[number] = Allocation(number=number, ranks_min=least, shares=shares)
        self.feed(Allocated(self.puts[number]))

    @rule(data=st.data())
    def allocate_again(self, data):
        """An old one comes late, or the newest twice: nothing changes."""
        self.begin_allocated()
        if not self.puts or self.launch.allocation is None:
            return
        number = data.draw(st.sampled_from(sorted(self.puts)))
        before = self.launch.allocation
        try:
            self.feed(Allocated(self.puts[number]))
        except StaleGenerationError:
            assert number < before.number
        assert before == self.launch.allocation

    def start(self, node, ranks):
        self.begin_allocated()
        return super().start(node, ranks)

    def see(self, process):
        super().see(process)
        view = round_view.view(self.launch, process.report.launcher, lease_s=LEASE_S)
        if view.ending is not None and view.ending.released and process.alive:
            place = self.launch.place(process.report.launcher)
            assert place is None, "who takes part is not released"
            process.alive = False
            process.view = LaunchView()
            self.say(process, left=True)

    @invariant()
    def a_round_is_of_an_allocation(self):
        launch = self.launch if hasattr(self, "launch") else None
        if launch is None or not launch.on:
            return
        wanted = self.puts[launch.allocated]
        for member in launch.members:
            share = wanted.share(member.node)
            assert share is not None, "nobody takes part who was not named"
            assert (share.ranks, share.devices) == (member.ranks, member.devices)
        ranks = sum(member.ranks for member in launch.members)
        whole = len(launch.members) == len(wanted.shares)
        assert whole or ranks >= wanted.ranks_min > 0, "a part only if that is enough"

    def teardown(self):
        """In peace the round is of the newest allocation, if all its launchers are there."""
        if not hasattr(self, "puts") or not hasattr(self, "launch"):
            return
        dead = {p.report.launcher for p in self.processes.values() if not p.alive}
        self.feed(Gone(frozenset(dead)))
        for _ in range(8):
            self.now_s += PAUSE_S_MAX
            self.feed(Tick(saved=True))  # so late that nobody need be warm any more
            for process in list(self.processes.values()):
                if process.alive:
                    self.say(process)
        launch = self.launch
        if launch.allocation is None or launch.ending or launch.stopping:
            return
        here = {one.node for one in allocated.ready(launch)}
        if launch.allocation.shares and all(s.node in here for s in launch.allocation.shares):
            assert launch.on
            assert allocated.is_met(launch)
            assert launch.allocated == launch.allocation.number
        outside = [one for one in launch.launchers if launch.allocation.share(one.node) is None]
        if not launch.on:
            assert not [one for one in outside if not one.stopping], "they are told to end"


del Rounds
TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
