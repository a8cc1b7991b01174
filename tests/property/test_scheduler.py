"""Turns of the scheduler under any order of reports, plans, deaths and outages: what always holds.

No GPU is used by two jobs at once, whatever is lost or late; nobody trains on a part of what it
was granted; and once everything is quiet every job has what the last plan wished (F95, F98, F105).
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.unit.scheduler.world import World

from holdfast.core.executions import Outcome
from holdfast_services.scheduler.domain.job import State

NODES = {"a": 2, "b": 2, "c": 1}
JOBS = ("j0", "j1", "j2")
ENDS = (Outcome.ENDED, Outcome.FAILED, Outcome.OUTSIDE, Outcome.STOPPED, Outcome.KILLED)
STEPS_COUNT = 80


class History:
    """What becomes of three jobs on three nodes, drawn from a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.world = World(**NODES)
        for name in JOBS:
            self.submit(name)
        self.plan()

    def run(self):
        things = {
            self.work: 24, self.plan: 3, self.submit: 2, self.cancel: 1, self.end: 2,
            self.outage: 1, self.silence: 1, self.time: 1,
        }  # fmt: skip
        for _ in range(STEPS_COUNT):
            (thing,) = self.random.choices(list(things), list(things.values()))
            thing()
            self.world.check()

    def submit(self, name=None):
        """A name that is over may be taken again, before all of the last is settled."""
        name = name or self.random.choice(JOBS)
        known = self.world.jobs.get(name)
        if known is not None and not known.over:
            return
        low = self.random.randint(1, 3)
        high = low + self.random.randint(0, 2)
        may = self.random.random() < 0.8
        job = self.world.submit(name, low, high, preemptible=may, retries=1)
        if known is not None:
            job = replace(job, held=known.held, number=known.number, told=known.told)
            self.world.jobs[name] = job

    def plan(self):
        """Any plan that deals out GPUs in turn, also one that no policy would make."""
        free = dict(NODES)
        where = self.random.sample(sorted(NODES), len(NODES))
        for name in self.random.sample(JOBS, len(JOBS)):
            spec = self.world.jobs[name].spec
            wanted = self.random.choice([spec.gpus_max, spec.gpus_min, spec.gpus_max + 1, 0])
            left, wish = min(wanted, sum(free.values())), {}
            for node in where:
                taken = min(free[node], left, self.random.randint(1, 2))
                if taken:
                    free[node] -= taken
                    left -= taken
                    wish[node] = taken
            self.world.wishes[name] = wish
            self.random.shuffle(where)

    def work(self):
        """Everybody does what is due, or half of them, in any order."""
        world = self.world
        does = [(world.turn,), *((world.begin_round, name) for name in JOBS)]
        does += [(world.tell, name) for name in JOBS] if world.metadata_up else []
        of_nodes = (world.carry_out, world.leave, self.report)
        does += [(act, node) for node in NODES for act in of_nodes]
        chance = self.random.choice([1.0, 0.7, 0.4, 0.2])
        self.random.shuffle(does)
        for act, *of in does:
            if self.random.random() < chance:
                act(*of)
                world.check()

    def report(self, node):
        aside = self.world.reported[node].aside
        self.world.report(node)
        self.world.reported[node] = replace(self.world.reported[node], aside=aside)

    def cancel(self):
        name = self.random.choice(JOBS)
        if not self.world.jobs[name].over:
            self.world.cancel(name)

    def end(self):
        """A launcher ends, by itself or killed."""
        node = self.random.choice(sorted(NODES))
        alive = [key for name in JOBS for key in self.world.executors[node].alive(name)]
        if alive:
            outcome = self.random.choice(ENDS)
            self.world.end(node, self.random.choice(alive), outcome)

    def outage(self):
        self.world.metadata_up = not self.world.metadata_up

    def silence(self):
        node = self.random.choice(sorted(NODES))
        known = self.world.reported[node]
        silent_s = self.random.choice([20.0, 500.0])
        live = self.random.random() < 0.5
        self.world.reported[node] = replace(known, silent_s=silent_s, agent_live=live)

    def time(self):
        self.world.turn(self.random.choice([1.0, 60.0, 400.0]))

    def calm(self):
        """Let all become quiet; each job that lives has its wish then, if it may have it at all."""
        world = self.world
        world.metadata_up = True
        for node in NODES:
            world.report(node)
        for gap_s in (4000.0, 400.0, 400.0, 400.0):
            world.now_s += gap_s
            world.settle()
            world.check()
        live = [job for job in world.jobs.values() if not job.over]
        stays = any(job.parts and not (self.fits(job) and job.spec.preemptible) for job in live)
        for name, job in world.jobs.items():
            assert not job.held, job
            if job.over:
                assert job.settled
                continue
            assert job.state in (State.QUEUED, State.RUNNING), job
            if self.fits(job) and not stays:
                assert job.shares == world.wishes[name], (job, world.wishes)
                assert not job.parts or job.state is State.RUNNING

    def fits(self, job):
        wished = sum(self.world.wishes[job.name].values())
        return wished == 0 or job.spec.gpus_min <= wished <= job.spec.gpus_max


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_no_gpu_is_used_twice_and_wishes_come_true(seed):
    history = History(seed)
    note(f"seed {seed}")
    history.run()
    history.calm()
