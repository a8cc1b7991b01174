"""One history: a cluster, a job, the trouble of a plan, and an end in peace.

In peace a commit and a restore must come within a bounded time, and what is due be durable.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from tests.simulation.bucket import Bucket, Queue
from tests.simulation.checks import STATES, Broken, name
from tests.simulation.ghosts import Ghosts
from tests.simulation.job import Job
from tests.simulation.losses import p5_nodes_may_go
from tests.simulation.metadata import Fleet
from tests.simulation.node import Node
from tests.simulation.plan import (
    NAMES,
    RANKS_MAX,
    TROUBLE_S,
    Plan,
    protection_of,
    ranks_per_node,
    slots_of,
)
from tests.simulation.segments import LENGTH, PART_BYTES
from tests.simulation.trouble import befall
from tests.simulation.worker import Worker
from tests.simulation.world import Do, Net, World

from holdfast.core.budget import memory_need
from holdfast_services.agent.domain import wanted_parts

PEACE_S_MAX = 40.0
COMMITS_IN_PEACE = 2


class History:
    """All that a plan makes; ``run`` raises ``Broken``, and ``world.story`` tells how it came."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        net = Net(
            lost=plan.lost, doubled=plan.doubled, answer_lost=plan.answer_lost, slow=plan.slow
        )
        self.world = world = World(plan.seed, net)
        self.ghosts = Ghosts(world)
        self.ghosts.losses = protection_of(plan).losses
        self.ghosts.sharded, self.ghosts.ranged = plan.sharded, plan.ranged
        self.bucket = Bucket(world, self.ghosts) if plan.workers else None
        self.queue = Queue(world) if plan.workers else None
        self.ghosts.bucket = self.bucket
        self.fleet = Fleet(world, plan, self.ghosts, self.bucket, self.queue)  # type: ignore[arg-type]
        self.nodes: dict[str, Node] = {}
        for each in NAMES[: plan.nodes]:
            node = Node(world, each, self.fleet, self.ghosts, self.bucket, _budget_bytes(plan))
            self.nodes[each] = node
            self.fleet.wake.append(node.hear)
        self.ghosts.nodes = self.nodes
        for node in self.nodes.values():
            node.nodes = self.nodes
            node.start()
        self.workers: list[Worker] = []
        for number in range(plan.workers):
            assert self.bucket is not None
            assert self.queue is not None
            made = (self.bucket, self.queue, self.nodes)
            self.workers.append(Worker(world, f"worker {number}", self.fleet, *made))
            self.workers[-1].start()
        self.job = Job(world, plan, self.nodes, self.ghosts)
        self.pinned: int | None = None
        self._ends: list[Callable[[], None]] = []

    @property
    def commits_count(self) -> int:
        """Checkpoints that were committed."""
        return self.ghosts.commits_count

    @property
    def restores_count(self) -> int:
        """Ranks that loaded one."""
        return self.ghosts.restores_count

    def close(self) -> None:
        """Give files back."""
        self.fleet.database.close()
        if self.queue:
            self.queue.close()

    def run(self) -> None:
        """Live through it; a part has ``PART_BYTES``, so that a segment has several."""
        with patch.object(wanted_parts, "PART_BYTES", PART_BYTES):
            self._run()

    def _run(self) -> None:
        plan = self.plan
        self.world.say(
            f"{plan.nodes} nodes, {plan.world_size} ranks, {protection_of(plan)}, "
            f"{plan.metadata} metadata services, {plan.workers} workers"
        )
        self.world.later(0.3, self.job.launch)
        for trouble in plan.troubles:
            self.world.later(trouble.at_s, lambda trouble=trouble: befall(self, trouble))  # type: ignore[misc]
        last_s = max((trouble.at_s for trouble in plan.troubles), default=0.0)
        self._until(plan.peace_s or min(TROUBLE_S, last_s + 2.0), lambda: False)
        self._peace()

    def until_peace(self, for_s: float, end: Do) -> None:
        """Have some trouble end after ``for_s``, or when all trouble does."""
        over = False

        def once() -> None:
            nonlocal over
            if not over:
                over = True
                end()

        self._ends.append(once)
        self.world.later(for_s, once)

    # -- peace ---------------------------------------------------------------------------------

    def _peace(self) -> None:
        self.world.say("all trouble ends")
        for end in self._ends:
            end()
        self.job.end_others()
        net = self.world.net
        net.lost = net.doubled = net.answer_lost = net.slow = 0.0
        self._expect_commits()
        self._expect_restore()
        if self.bucket is not None and self.plan.persist_steps:
            self._expect_durable()

    def _expect_commits(self) -> None:
        """P5: training is protected again, by more than what came late."""
        before = self.ghosts.commits_count
        if not self._until(
            self.world.now_s + PEACE_S_MAX,
            lambda: (
                self.ghosts.commits_count >= before + COMMITS_IN_PEACE
                and self.ghosts.floor is not None
            ),
        ):
            raise Broken(f"P5: {self.ghosts.commits_count - before} commits within "
                         f"{PEACE_S_MAX:.0f} s of peace")  # fmt: skip

    def _expect_restore(self) -> None:
        """P5: after one more death training goes on from what was committed, or later."""
        kept, attempt, lost_count = self.ghosts.floor, self.job.attempt, self.ghosts.lost_count
        self.job.start = None
        self.world.say(f"rank 0 is killed in peace; {name(kept)} is acknowledged")
        self.job.kill(0)

        def back() -> bool:
            now = self.job.attempt
            return now is not attempt and now is not None and all(r.begun for r in now.ranks)

        if not self._until(self.world.now_s + PEACE_S_MAX, back):
            raise Broken(f"P5: nothing was restored within {PEACE_S_MAX:.0f} s of peace")
        now = self.job.attempt
        assert now is not None
        restored = now.ranks[0].restored
        lost = self.ghosts.lost_count > lost_count  # and rightly so: a bit had flipped, say
        # An attempt that was asked to start over before the peace may have begun since.
        left = kept is not None and self.ghosts.left.covers(kept)
        if kept and not (lost or left) and (restored is None or restored.step < kept.step):
            raise Broken(f"P5: {name(restored)} was restored, {name(kept)} was acknowledged")

    def _expect_durable(self) -> None:
        """M8, 4.6: what becomes due gets to the bucket, whatever the queue has forgotten."""
        known = set(self.ghosts.manifests)
        if not self._until(
            self.world.now_s + PEACE_S_MAX, lambda: bool(set(self.ghosts.manifests) - known)
        ):
            raise Broken(f"M8: nothing became durable within {PEACE_S_MAX:.0f} s of peace")

    # -- the loop ------------------------------------------------------------------------------

    def _until(self, until_s: float, met: Callable[[], bool]) -> bool:
        """Let things happen until a condition is met; False: it was not in time."""
        while self.world.now_s < until_s:
            self.world.step()
            if self.ghosts.moved:
                self.ghosts.moved = False
                for check in (*STATES, p5_nodes_may_go):
                    check(self.ghosts)
            if met():
                return True
        return False


def _budget_bytes(plan: Plan) -> int:
    """Return what a node needs for its share of the largest job, and what the plan adds."""
    each = ranks_per_node(plan)
    part = min(each * (plan.replicas + 2), RANKS_MAX)
    need = memory_need(
        own_bytes=LENGTH * each, restored_bytes=LENGTH * (part if plan.sharded else RANKS_MAX),
        protection=protection_of(plan), nodes_count=plan.nodes, shards_count=each,
        slots=slots_of(plan), persist=bool(plan.persist_steps),
    )  # fmt: skip
    return need.total_bytes + LENGTH * plan.spare_slots
