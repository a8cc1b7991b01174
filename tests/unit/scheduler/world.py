"""Jobs, nodes and rounds over the scheduler's turns, without processes: what is, and what is told.

A turn sees what was reported; what runs, runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.core.executions import LaunchState, Outcome
from holdfast.core.job_spec import JobSpec
from holdfast_services.scheduler.domain.advance import advance
from holdfast_services.scheduler.domain.cluster import Cluster, Node, Round
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.numbers import Numbers
from holdfast_services.scheduler.domain.orders import allocation, orders_by_node


@dataclass
class Executor:
    """A node as it is: launchers by (job, start), and the orders that it has carried out."""

    gpus: int
    applied: int = 0
    launchers: dict = field(default_factory=dict)
    told_to_end: dict = field(default_factory=dict)

    def alive(self, job):
        return [key for key, state in self.launchers.items() if key[0] == job and running(state)]


@dataclass
class Launch:
    """What metadata has of a job, and what its ranks run on."""

    allocation: object = None
    running: dict = field(default_factory=dict)
    number: int = 0


def running(state):
    return state.outcome is Outcome.RUNNING


class World:
    def __init__(self, **gpus):
        self.now_s = 1000.0
        self.executors = {name: Executor(count) for name, count in gpus.items()}
        self.reported = {}
        self.launches = {}
        self.jobs = {}
        self.wishes = {}
        self.numbers = Numbers(0)
        self.metadata_up = True
        self.news = False
        for name in gpus:
            self.report(name)

    # ------------------------------------------------------------------------ what people do

    def submit(self, name, low=1, high=None, **what):
        spec = JobSpec(name=name, command=("x.py",), gpus_min=low, gpus_max=high or low, **what)
        self.jobs[name] = Job(spec=spec, id=name, submitted_at_s=self.now_s, since_s=self.now_s)
        return self.jobs[name]

    def cancel(self, name):
        self.jobs[name] = replace(self.jobs[name], cancel="by a user")

    def wish(self, name, **gpus):
        self.wishes[name] = gpus

    # --------------------------------------------------------------------- what processes do

    def report(self, node):
        """Have an executor tell what it has."""
        executor = self.executors[node]
        self.reported[node] = Node(
            name=node,
            gpus=executor.gpus,
            applied=executor.applied,
            launches=tuple(executor.launchers.values()),
        )

    def carry_out(self, node):
        """Have an executor read its orders and do what they say."""
        orders = orders_by_node(self.jobs.values(), self.now_s).get(node)
        if orders is None:
            return
        executor = self.executors[node]
        ordered = {(order.job, order.start): order for order in orders.orders}
        for key, order in ordered.items():
            if key not in executor.launchers and not order.leaving:
                taken = self.launches[key[0]].allocation
                assert taken.number >= key[1], "a launcher must not come before its allocation"
                executor.launchers[key] = LaunchState(job=key[0], start=key[1])
        for key, state in list(executor.launchers.items()):
            if key in ordered:
                continue
            if running(state):
                executor.told_to_end.setdefault(key, Outcome.STOPPED)
            else:
                del executor.launchers[key]
        executor.applied = orders.number

    def end(self, node, key, outcome, code=1, reason="it ended"):
        """Have a launcher end; its ranks with it."""
        launchers = self.executors[node].launchers
        launchers[key] = replace(launchers[key], outcome=outcome, code=code, reason=reason)
        launch = self.launches.get(key[0])
        if launch and not self.executors[node].alive(key[0]):
            launch.running.pop(node, None)
            launch.number = 0

    def leave(self, node):
        """Have the launchers that were told to end do so; it takes them a while."""
        executor = self.executors[node]
        for key, outcome in executor.told_to_end.items():
            if key in executor.launchers and running(executor.launchers[key]):
                self.end(node, key, outcome, 143)
        executor.told_to_end.clear()

    def tell(self, name):
        """Have metadata take a job's allocation."""
        job = self.jobs[name]
        if job.number <= job.told:
            return
        launch = self.launches.setdefault(name, Launch())
        if launch.allocation is None or launch.allocation.number < job.number:
            launch.allocation = allocation(job)
        self.jobs[name] = replace(job, told=job.number)

    def begin_round(self, name):
        """Have metadata begin the round of its allocation, if all launchers are there."""
        launch = self.launches.get(name)
        if launch is None:
            return
        shares = {one.node: one.devices for one in launch.allocation.shares}
        if not all(self.executors[node].alive(name) for node in shares):
            return
        outside = [
            (node, key)
            for node, executor in self.executors.items()
            if node not in shares
            for key in executor.alive(name)
        ]
        # Ranks outside are killed by their launchers, which takes these a while.
        still = {node: launch.running[node] for node, _ in outside if node in launch.running}
        launch.running = {**still, **shares}
        launch.number = launch.allocation.number if shares else 0
        for node, key in outside:
            self.executors[node].told_to_end.setdefault(key, Outcome.RELEASED)

    # ------------------------------------------------------------------------------ the turn

    def turn(self, seconds=0.0):
        self.now_s += seconds
        rounds = {
            name: Round(
                newest=launch.allocation.number,
                number=launch.number,
                begun=bool(launch.number),
            )
            for name, launch in self.launches.items()
        }
        cluster = Cluster(nodes=self.reported, rounds=rounds if self.metadata_up else None)
        jobs = [job for job in self.jobs.values() if not job.settled]
        made = advance(jobs, self.wishes, cluster, self.numbers, self.now_s)
        self.jobs |= made.jobs
        self.news = made.news
        self.reported = {
            name: replace(node, aside=made.asides.get(name)) for name, node in cluster.nodes.items()
        }
        return made

    def settle(self, turns=12):
        """Let everybody do what they would, until nothing changes."""
        for _ in range(turns):
            self.turn()
            for name in self.jobs:
                self.tell(name)
            for node in self.executors:
                self.carry_out(node)
            for name in self.jobs:
                self.begin_round(name)
            for node in self.executors:
                self.leave(node)
            for node in self.executors:
                aside = self.reported[node].aside if node in self.reported else None
                self.report(node)
                self.reported[node] = replace(self.reported[node], aside=aside)

    def check(self):
        """No GPU is used by two jobs, or given to two; nobody has a part of what it asked for."""
        for node in self.executors:
            used = [
                device
                for launch in self.launches.values()
                for device in launch.running.get(node, ())
            ]
            assert len(used) == len(set(used)), (node, self.launches)
            owners = {}
            for job in self.jobs.values():
                for part in (*job.parts, *job.held):
                    for device in part.devices if part.node == node else ():
                        assert owners.setdefault(device, job.name) == job.name, (node, device)
        for job in self.jobs.values():
            assert not job.parts or job.spec.gpus_min <= job.gpus <= job.spec.gpus_max, job
            assert len({part.node for part in job.parts}) == len(job.parts)
            assert not (job.over and job.parts)
            assert job.told <= job.number
