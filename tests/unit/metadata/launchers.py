"""Launchers by name over the decision about rounds: what they say, and what they are told."""

from dataclasses import replace

from holdfast.core.rounds import LauncherReport, RankFailure, Terms
from holdfast_services.metadata.domain import round_view, rounds
from holdfast_services.metadata.domain.launch import Launch
from holdfast_services.metadata.domain.rounds import Reported, Tick

LEASE_S = 3.0


class Cluster:
    """Launchers by name, each on a node of that name unless said otherwise."""

    def __init__(self, **terms):
        self.now_s = 1000.0
        self.launch = Launch(job="gpt")
        self.terms = Terms(command="c0ffee", **{"nodes_min": 2, "nodes_max": 2, **terms})
        self.reports = {}
        self.events = []

    def feed(self, event):
        self.launch, news = rounds.handle(self.launch, event, now_s=self.now_s, lease_s=LEASE_S)
        self.events += [event.kind for event in news]

    def say(self, name, node=None, **what):
        last = self.reports.get(name) or LauncherReport(
            launcher=name * 16, sequence=0, job="gpt", terms=self.terms, port=7000, ranks=2
        )
        renewed = what.get("round", last.round) != last.round
        what = {"port": last.port + renewed, **what}
        report = replace(last, sequence=last.sequence + 1, **what)
        self.reports[name] = report
        self.feed(Reported(report, node or name, f"{node or name}.example"))
        return report

    def follow(self, *names):
        """Have launchers begin the round that they are told of."""
        for name in names:
            self.say(name, round=self.launch.nonce, finished=False, failure=None)

    def fail(self, name, reason="ValueError: no", **what):
        failure = RankFailure(rank=0, code=1, reason=reason, **what)
        self.say(name, failure=failure)

    def tick(self, seconds=0.0, **what):
        self.now_s += seconds
        self.feed(Tick(**what))

    def place(self, name):
        return self.launch.place(name * 16)

    def view(self, name):
        return round_view.view(self.launch, name * 16, lease_s=LEASE_S)


def two_nodes():
    """Return two launchers whose ranks run."""
    cluster = Cluster()
    cluster.say("aa")
    cluster.say("bb")
    cluster.follow("aa", "bb")
    return cluster
