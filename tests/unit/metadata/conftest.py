"""A cluster on paper: nodes, ranks and one run, moved by the pure rules alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from tests.said import changed_status, rank_status, registration, tcp

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import BadSource, HeldShard, HeldState, Inventory, Peer
from holdfast.core.shard import Shard
from holdfast.core.sources import Memory
from holdfast_services.metadata.domain.advance_run import advance
from holdfast_services.metadata.domain.drains import finish
from holdfast_services.metadata.domain.model import Limits, Node, Run, Stored
from holdfast_services.metadata.domain.node_view import node_view, world
from holdfast_services.metadata.domain.readmitted_attempt import seat

RUN = "0123456789ab"
JOB = "gpt/small"


@dataclass
class Machine:
    """What one node's agent would report next."""

    name: str
    incarnation: int = 1
    sequence: int = 0
    domain: str = ""
    shards: dict = field(default_factory=dict)
    ranks: dict = field(default_factory=dict)
    abandoned: tuple = ()
    bad_sources: tuple = ()
    leaving: bool = False
    seen: tuple = ()
    elements: dict = field(default_factory=dict)
    budget_bytes: int = 1 << 20
    room_bytes: int = 1 << 20


class Cluster:
    """Drives one run through registrations, reports and the clock."""

    def __init__(self):
        self.now_s = 1000.0
        self.limits = Limits(node_lease_s=5.0, decide_wait_s=10.0)
        self.run = Run(id=RUN, job=JOB)
        self.nodes = {}
        self.machines = {}
        self.nonces = {}
        self.objects = {}
        self.events = []
        self.deaf = set()
        self.launches = ()

    # what happens

    def object_tier(self):
        self.limits = replace(self.limits, object_tier=True)

    def finish(self, step, generation, *, world=2, digest=None):
        """A worker says that the draining checkpoint is durable."""
        key = CheckpointId(RUN, step, generation)
        assert any(drain.checkpoint == key for drain in self.run.drains)
        self.run = finish(self.run, key, self.now_s)
        self.put_object(step, generation, world=world, digest=digest)
        self.settle()

    def put_object(self, step, generation, *, world=2, digest=None):
        key = CheckpointId(RUN, step, generation)
        shards = (shard(step, generation, r, world=world, digest=digest) for r in range(world))
        self.objects[key] = Stored(checkpoint=key, shards=tuple(shards))

    def shard_done(self, step, generation, rank):
        """A worker says that one shard lies in the object store."""
        key = shard(step, generation, rank).id
        drains = (
            replace(d, missing=tuple(s for s in d.missing if s.id != key)) for d in self.run.drains
        )
        self.run = replace(self.run, drains=tuple(drains))

    def change(self, step, generation, **changes):
        """Change a row as storage would load it."""
        rows = (
            replace(row, **changes)
            if (row.id.step, row.id.generation) == (step, generation)
            else row
            for row in self.run.checkpoints
        )
        self.run = replace(self.run, checkpoints=tuple(rows))

    def load(self):
        """Fill in what storage loads while a restore is decided or loaded."""
        chosen = self.run.decision.checkpoint if self.run.decision else None
        stored = (
            replace(known, bad=tuple(s.id for s in known.shards)) if row.bad else known
            for row in self.run.checkpoints
            if row.durable_at_s is not None
            and not row.expired
            and (known := self.objects.get(row.id))
            and (row.id == chosen or self.run.usable(row.id))
        )
        wanted = self.run.deciding or self.run.loading
        self.run = replace(self.run, stored=tuple(stored) if wanted else ())

    def machine(self, name, domain=""):
        return self.machines.setdefault(name, Machine(name=name, domain=domain))

    def join(self, *names):
        for name in names:
            self.machine(name)
            self.report(name)

    def register(
        self,
        rank,
        node,
        *,
        world=2,
        nonce=b"first",
        launcher="L",
        takeover=False,
        replicas=1,
        replica_domain="",
        parity=None,
        persist=None,
        retention=None,
        generation_min=0,
        start=None,
        generation=0,
        restored=None,
        slots=0,
        names_needs=False,
    ):
        wish = registration(
            job=JOB,
            nonce=nonce,
            launcher=launcher,
            holder=f"holder of {launcher}",
            takeover=takeover,
            rank=rank,
            world_size=world,
            node=node,
            replicas=replicas,
            replica_domain=replica_domain,
            parity=parity,
            persist=persist,
            retention=retention,
            generation_min=generation_min,
            start=start,
            generation=generation,
            restored=restored,
            slots=slots,
            names_needs=names_needs,
        )
        outcome = seat(self.run, wish, self.nonces.get(nonce), self.now_s, self.limits)
        self.run = outcome.run
        self.events += outcome.events
        self.nonces.setdefault(nonce, self.run.generation)
        generation = self.nonces[nonce]
        self.status(node, rank, generation=generation)
        self.settle()
        return generation

    def launch(self, nonce, *nodes, world=None, **wishes):
        """Register one rank per node, in order, and let every host report."""
        for rank, node in enumerate(nodes):
            self.register(
                rank,
                node,
                world=world or len(nodes),
                nonce=nonce,
                **wishes,
            )
        for node in dict.fromkeys(nodes):
            self.report(node)
        return self.run.generation

    def status(self, node, rank, **changes):
        ranks = self.machine(node).ranks
        known = ranks.get(rank)
        generation = changes.get("generation", known.generation if known else 0)
        if known is None or known.generation != generation:
            known = rank_status(job=JOB, run=RUN, generation=generation, rank=rank)
        ranks[rank] = changed_status(known, **changes)

    def hold(
        self,
        node,
        step,
        generation,
        rank,
        *,
        world=2,
        owner=None,
        digest=None,
        state=1,
        plan="plan",
    ):
        item = shard(step, generation, rank, world=world, digest=digest, plan=plan)
        self.machine(node).shards[item.id] = HeldShard(
            shard=item, state=HeldState(state), owner=owner or node, slot_incarnation=1
        )

    def drop(self, node, step, generation, rank):
        del self.machine(node).shards[shard(step, generation, rank).id]

    def forget(self, run=None):
        """The database is lost, or that of a backup: what it knew of the run, and of no node."""
        self.run = run or Run(id=RUN, job=JOB)
        self.nodes, self.nonces = {}, {}

    def wipe(self, node):
        """The node comes back as a new agent with an empty arena."""
        old = self.machines[node]
        self.machines[node] = replace(
            Machine(name=node, incarnation=old.incarnation + 1, domain=old.domain),
            budget_bytes=old.budget_bytes,
        )

    def abandon(self, node, step, generation, reason="busy"):
        machine = self.machine(node)
        item = AbandonedStep(run=RUN, step=step, generation=generation, reason=reason)
        machine.abandoned = (*machine.abandoned, item)

    def accuse(self, node, step, generation, rank, source, decision):
        """The node says that a source, or a node by its name, had no good bytes."""
        bad = Memory(source) if isinstance(source, str) else source
        machine = self.machine(node)
        key = shard(step, generation, rank).id
        machine.bad_sources = (
            *machine.bad_sources,
            BadSource(shard=key, source=bad, decision=decision),
        )

    def report(self, *names):
        for name in names:
            machine = self.machine(name)
            machine.sequence += 1
            self.deliver(self.inventory(name))
        self.hear()

    def hear(self):
        """Every live node gets its view; one that sees a new commit reports again, at once."""
        for name in [n for n, node in self.nodes.items() if node.live(self.now_s)]:
            machine, views = self.machine(name), self.view(name).runs
            keys = (*machine.seen, *(c.checkpoint for run in views for c in run.committed))
            newest = max(keys, key=lambda key: (key.generation, key.step), default=None)
            if newest and machine.seen != (newest,) and name not in self.deaf:
                machine.seen = (newest,)
                machine.sequence += 1
                self.deliver(self.inventory(name))

    def inventory(self, name):
        machine = self.machines[name]
        peer = Peer(
            node=name, rpc_address=f"{name}:1", endpoints=tcp(f"{name}:2"), domain=machine.domain
        )
        return Inventory(
            node=peer,
            incarnation=machine.incarnation,
            sequence=machine.sequence,
            budget_bytes=machine.budget_bytes,
            room_bytes=machine.room_bytes,
            shards=tuple(machine.shards.values()),
            ranks=tuple(machine.ranks.values()),
            abandoned=machine.abandoned,
            bad_sources=machine.bad_sources,
            leaving=machine.leaving,
            seen=machine.seen,
            elements=tuple(machine.elements.values()),
        )

    def deliver(self, inventory):
        """As storage does: replaced unless (incarnation, sequence) is lower."""
        known = self.nodes.get(inventory.node.node)
        key = (inventory.incarnation, inventory.sequence)
        if known and key < (known.inventory.incarnation, known.inventory.sequence):
            return
        until_s = 0.0 if inventory.leaving else self.now_s + self.limits.node_lease_s
        self.nodes[inventory.node.node] = Node(
            inventory=inventory, reported_at_s=self.now_s, lease_until_s=until_s
        )
        self.settle()

    def settle(self):
        self.load()
        outcome = advance(self.run, self.nodes, self.now_s, self.limits)
        self.run = outcome.run
        self.events += outcome.events
        self.load()
        again = advance(self.run, self.nodes, self.now_s, self.limits)
        assert again.run == self.run, "the same facts changed something twice"
        assert not again.events

    def later(self, seconds):
        self.now_s += seconds
        self.settle()

    def ready(self, *pairs):
        """Ranks say that all they need for the open decision is here."""
        number = self.run.decision.number
        for node, rank in pairs:
            self.status(node, rank, ready_decision=number)
        self.report(*dict.fromkeys(node for node, _ in pairs))

    # what is seen

    def world(self):
        return world(self.nodes, (self.run,), self.now_s, self.limits, self.launches)

    def view(self, node):
        return node_view(self.world(), node)

    def levels(self):
        return {
            (row.id.step, row.id.generation): "local"
            if row.replicated_at_s is None
            else "replicated"
            for row in self.run.checkpoints
        }

    def row(self, step, generation):
        key = CheckpointId(RUN, step, generation)
        return next(row for row in self.run.checkpoints if row.id == key)

    def draining(self):
        return [row.id.step for row in reversed(self.run.checkpoints) if row.draining]

    def commit(self, step, generation, *nodes, digest=None):
        """Every node saves its rank's shard, holds all of them, and reports."""
        for node in nodes:
            for rank, owner in enumerate(nodes):
                self.hold(
                    node, step, generation, rank, owner=owner, world=len(nodes), digest=digest
                )
        self.report(*nodes)

    def decided(self):
        decision = self.run.decision
        key = decision.checkpoint
        return decision.state.name, (key.step, key.generation) if key else None

    def kinds(self):
        return [event.kind for event in self.events]


def shard(step, generation, rank, *, world=2, digest=None, plan="plan"):
    return Shard(
        id=ShardId(RUN, step, generation, rank),
        job=JOB,
        world_size=world,
        plan_hash=plan,
        length_bytes=100,
        root_digest=digest or bytes([rank]) * 16,
    )


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def checkpoint():
    return lambda step, generation: CheckpointId(RUN, step, generation)
