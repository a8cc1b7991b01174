"""A job: attempts one after the other, sometimes two at once, as launchers and users have it."""

from __future__ import annotations

from tests.simulation.checks import Broken
from tests.simulation.ghosts import Ghosts
from tests.simulation.node import Node
from tests.simulation.plan import Plan, ranks_per_node
from tests.simulation.rank import Process
from tests.simulation.world import World

from holdfast.core.decision import Start
from holdfast.core.session import SessionView

STUCK_S_MAX = 2.0
KILL_S_MAX = 2.0


class Attempt:
    """All ranks of one launch; they step together."""

    def __init__(self, job: Job, number: int, nodes: list[Node], *, takeover: bool) -> None:
        self.job, self.number = job, number
        self.nonce = f"nonce {number}".encode()
        self.launcher, self.takeover, self.start = job.launcher, takeover, job.start
        self.world_size, self.step_s = len(nodes), job.plan.step_s
        self.over = False
        self.lost = False
        self.refused = False
        self._nodes = nodes
        job.ghosts.living.add(self.nonce)
        self._stepping = self._saved_first = False
        self._from: tuple[int, int] | None = None
        self._stuck_s = 0.0
        job.world.say(f"attempt {number} begins on {', '.join(n.name for n in nodes)}")
        self.ranks: list[Process] = []
        for rank, node in enumerate(nodes):
            self.ranks.append(Process(self, rank, node))
        self._watch()

    def on(self, node: Node) -> int:
        """Return how many ranks a node has."""
        return sum(other is node for other in self._nodes)

    def come_from(self, lineage: int, step: int) -> None:
        """P1: all ranks load the same moment of the same line."""
        if self._from is None:
            self._from = (lineage, step)
        if self._from != (lineage, step):
            raise Broken(f"P1: ranks of one attempt loaded {self._from} and {(lineage, step)}")

    def try_step(self) -> None:
        """Take the next step in a while, if all ranks are where they can."""
        if not self._stepping and self._can_step():
            self._stepping = True
            self.job.world.later(self.step_s, self._step)

    def _can_step(self) -> bool:
        frozen = self.job.world.frozen
        return not self.over and all(
            r.alive and r.begun and not r.busy and not frozen(r.party) for r in self.ranks
        )

    def _step(self) -> None:
        self._stepping = False
        if not self._can_step():
            return  # the gate: the copy that ends, or who watches, tries again
        step = 0 if self._saves_first() else max(rank.step for rank in self.ranks) + 1
        for rank in self.ranks:
            rank.stepped(step, save=step % self.job.plan.save_every == 0)
        self.try_step()

    def _saves_first(self) -> bool:
        """Tell whether step 0 is saved next: once, by who has restored nothing."""
        fresh = self.job.plan.saves_first and all(rank.restored is None for rank in self.ranks)
        first, self._saved_first = fresh and not self._saved_first, True
        return first

    def _watch(self) -> None:
        """What a collective's timeout does: end an attempt of which a rank does not move."""
        if self.over:
            return
        world = self.job.world
        stuck = any(world.frozen(rank.party) or not rank.alive for rank in self.ranks)
        self._stuck_s = self._stuck_s + STUCK_S_MAX / 2 if stuck else 0.0
        if self._stuck_s > STUCK_S_MAX:
            world.say(f"the launcher of attempt {self.number} gives it up: a rank does not move")
            self.end()
            return
        self.try_step()
        world.later(STUCK_S_MAX / 2, self._watch)

    def end(self) -> None:
        """A rank has ended: the launcher ends the others and starts again."""
        if self.over:
            return
        self.over = True
        self.job.ghosts.living.discard(self.nonce)
        for rank in self.ranks:
            wait_s = self.job.world.rng.uniform(0.05, KILL_S_MAX)
            # A process of a frozen node hears of it when the node goes on.
            self.job.world.later(wait_s, rank.kill, rank.party)
        self.job.ended(self)


class Job:
    """What its user wants, and the attempts there were; the newest launcher starts them."""

    def __init__(self, world: World, plan: Plan, nodes: dict[str, Node], ghosts: Ghosts) -> None:
        self.world, self.plan, self.nodes, self.ghosts = world, plan, nodes, ghosts
        self.world_size = plan.world_size
        self.launcher = "launcher 1"
        self.start: Start | None = None
        self.attempt: Attempt | None = None
        self._processes: dict[str, Process] = {}
        self._attempts_count = 0
        self._launchers_count = 1
        self._starts_count = 0
        for node in nodes.values():
            node.on_view = self._on_view

    def launch(self) -> None:
        """Begin an attempt on nodes that are there; wait if there are too few."""
        there = [n for n in self.nodes.values() if n.there and not self.world.frozen(n.name)]
        if self.world_size > len(there) * ranks_per_node(self.plan):
            self.world.later(1.0, self.launch)  # what is there has no memory for it
            return
        self._attempts_count += 1
        self.world.rng.shuffle(there)
        chosen = [there[rank % len(there)] for rank in range(self.world_size)]
        takeover = self._launchers_count > 1  # it stands in the script that took the job over
        self.attempt = Attempt(self, self._attempts_count, chosen, takeover=takeover)
        for process in self.attempt.ranks:
            self._processes[process.session] = process

    def ended(self, attempt: Attempt) -> None:
        """Start again, unless another launcher has the job by now."""
        if attempt is not self.attempt or attempt.launcher != self.launcher:
            return
        if attempt.lost:
            self.begin_at(Start(name=self._name(), fresh=True))  # its user has it start over
        elif attempt.refused and attempt.start and not attempt.start.fresh:
            self.start = None  # the step that was asked for cannot be had
        self.world.later(self.world.rng.uniform(0.2, 1.5), self._relaunch)

    def _relaunch(self) -> None:
        if self.attempt is None or self.attempt.over:
            self.launch()

    def begin_at(self, start: Start) -> None:
        """Have the next attempt begin elsewhere."""
        self.start = start

    def end_others(self) -> None:
        """Whoever else had started the job gives up."""
        for attempt in {p.attempt.number: p.attempt for p in self._processes.values()}.values():
            if attempt is not self.attempt:
                attempt.end()

    def restart(self) -> None:
        """Its user ends the attempt; the launcher starts another."""
        if self.attempt:
            for process in self.attempt.ranks:
                if not self.world.frozen(process.party):
                    process.kill()
            self.attempt.end()

    def take_over(self) -> None:
        """Somebody else starts the job while it runs."""
        self._launchers_count += 1
        self.launcher = f"launcher {self._launchers_count}"
        self.launch()

    def new_start(self, step: int | None) -> None:
        """Restart at an older step, None: at step 0."""
        self.begin_at(Start(name=self._name(), fresh=step is None, step=step or 0))
        self.restart()

    def kill(self, rank: int) -> None:
        """Kill a rank of the attempt that runs."""
        if self.attempt and not self.attempt.over and rank < len(self.attempt.ranks):
            self.attempt.ranks[rank].kill()
            self.attempt.end()

    def processes(self, node: Node) -> list[Process]:
        """Return all that live on a node, of whatever attempt."""
        return [p for p in self._processes.values() if p.node is node and p.alive]

    def node_gone(self, node: Node) -> None:
        """All processes of a node have died with it."""
        for process in self.processes(node):
            process.kill()
            process.attempt.end()

    def _name(self) -> str:
        self._starts_count += 1
        return f"start {self._starts_count}"

    def _on_view(self, session: str, view: SessionView) -> None:
        process = self._processes.get(session)
        if process is not None and process.alive:
            process.on_view(view)
