"""Whatever the nodes say, in whatever order: what a decision may name and what never changes."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.said import rank_status, registration, tcp

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.decision import DecisionState, Start
from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import BadSource, HeldShard, HeldState, Inventory, Peer
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.shard import Shard
from holdfast.core.sources import Memory, Object
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain.advance_run import advance
from holdfast_services.metadata.domain.attempts import register
from holdfast_services.metadata.domain.believed_copies import gather
from holdfast_services.metadata.domain.drains import finish
from holdfast_services.metadata.domain.model import Limits, Node, Run, Stored
from holdfast_services.metadata.domain.worker_plans import items

RUN, JOB, WORLD = "run0", "job", 2
NODES = ("a", "b", "c")
SOURCES = (*map(Memory, NODES), Object())
LIMITS = Limits(node_lease_s=5.0, decide_wait_s=10.0, object_tier=True)

shard_ids = st.builds(
    ShardId,
    st.just(RUN),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, WORLD - 1),
)


@st.composite
def held(draw):
    key = draw(shard_ids)
    shard = Shard(
        id=key,
        job=JOB,
        world_size=WORLD,
        plan_hash="p",
        length_bytes=1,
        root_digest=draw(st.sampled_from([b"0" * 16, b"0" * 16, b"1" * 16])),
    )
    return HeldShard(
        shard=shard,
        state=draw(st.sampled_from([HeldState.SEALED, HeldState.SEALED, HeldState.QUARANTINED])),
        owner=draw(st.sampled_from(NODES)),
        slot_incarnation=1,
    )


reports = st.tuples(
    st.just("report"),
    st.sampled_from(NODES),
    st.lists(held(), max_size=8, unique_by=lambda item: item.shard.id),
    st.booleans(),  # ready for what is proposed
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=1),  # abandoned
    st.lists(st.tuples(shard_ids, st.sampled_from(SOURCES)), max_size=2),  # accused
)
starts = st.one_of(
    st.none(),
    st.none(),
    st.sampled_from([Start(name="fresh", fresh=True), Start(name="fresh again", fresh=True)]),
    st.integers(1, 4).map(lambda step: Start(name=f"step {step}", step=step)),
)
launches = st.tuples(st.just("launch"), st.permutations(NODES), starts)
waits = st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 6.0, 11.0]))
# What workers say: a shard or the whole of what is on its way lies there, or is wrong or expired.
works = st.tuples(st.just("work"), st.sampled_from(["shard", "durable", "durable"]))
marks = st.tuples(
    st.just("mark"),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["expired", "bad", "mended"]),
)
# What usually happens: all save a step, a node loses all it holds, all are ready.
saves = st.tuples(st.just("save"), st.integers(1, 4))
losses = st.tuples(
    st.just("lose"),
    st.sets(st.sampled_from(NODES), min_size=1),
    st.sampled_from([None, 0, 1]),  # the shards of one rank, or all
)
readies = st.tuples(st.just("ready"))
events = st.one_of(
    reports, saves, saves, works, works, losses, launches, readies, readies, marks, waits
)
histories = st.tuples(launches, readies, saves, st.lists(events, min_size=12, max_size=40)).map(
    lambda parts: [*parts[:3], *parts[3]]
)


class Catalogue:
    """The run and its nodes; ``check`` holds after every event."""

    def __init__(self):
        self.now_s = 100.0
        self.run = Run(id=RUN, job=JOB)
        self.nodes = {}
        self.sequence = 0
        self.launches = 0
        self.objects = {}
        self.on_their_way = {}

    def happen(self, event):
        before = self.run
        getattr(self, event[0])(*event[1:])
        self.load()
        outcome = advance(self.run, self.nodes, self.now_s, LIMITS)
        self.run = outcome.run
        for drain in self.run.drains:
            self.on_their_way.setdefault(drain.checkpoint, drain.missing)
        going = {drain.checkpoint for drain in self.run.drains}
        self.on_their_way = {k: v for k, v in self.on_their_way.items() if k in going}
        self.load()
        self.check(before)

    def load(self):
        """As storage does: the objects of what may be restored, while a restore needs them."""
        run = self.run
        chosen = run.decision.checkpoint if run.decision else None
        found = (
            self.objects[row.id]
            for row in run.checkpoints
            if row.stored and (row.id == chosen or run.usable(row.id))
        )
        self.run = replace(run, stored=tuple(found) if run.deciding or run.loading else ())

    def work(self, what):
        if not self.run.drains:
            return
        drain = self.run.drains[0]
        if what == "shard" and drain.missing:
            changed = replace(drain, missing=drain.missing[1:])
            self.run = replace(self.run, drains=(changed, *self.run.drains[1:]))
        elif what == "durable":
            key, shards = drain.checkpoint, self.on_their_way[drain.checkpoint]
            self.objects[key] = Stored(checkpoint=key, shards=shards)
            self.run = finish(self.run, key, self.now_s)

    def save(self, step):
        if self.run.deciding:
            return  # nobody saves before it has restored
        for name in NODES:
            known = self.nodes[name].inventory.shards if name in self.nodes else ()
            key = (step, self.run.generation)
            others = [h for h in known if (h.shard.id.step, h.shard.id.generation) != key]
            made = [
                HeldShard(
                    shard=Shard(
                        id=ShardId(RUN, *key, rank),
                        job=JOB,
                        world_size=WORLD,
                        plan_hash="p",
                        length_bytes=1,
                        root_digest=b"0" * 16,
                    ),
                    state=HeldState.SEALED,
                    owner=NODES[rank],
                    slot_incarnation=1,
                )
                for rank in range(WORLD)
            ]
            self.report(name, (*others, *made), False, (), ())

    def lose(self, names, rank):
        for name in sorted(names & self.nodes.keys()):
            held = self.nodes[name].inventory.shards
            left = (h for h in held if rank is not None and h.shard.id.rank != rank)
            self.report(name, tuple(left), False, (), ())

    def ready(self):
        for name in NODES:
            known = self.nodes[name].inventory.shards if name in self.nodes else ()
            self.report(name, known, True, (), ())

    def mark(self, step, generation, what):
        key = CheckpointId(RUN, step, generation)
        rows = (
            replace(row, expired=row.expired or what == "expired", bad=what == "bad")
            if row.id == key and row.durable_at_s is not None
            else row
            for row in self.run.checkpoints
        )
        self.run = replace(self.run, checkpoints=tuple(rows))

    def wait(self, seconds):
        self.now_s += seconds

    def launch(self, order, start):
        self.launches += 1
        nonce = str(self.launches).encode()
        for rank in range(WORLD):
            wish = registration(
                job=JOB,
                nonce=nonce,
                launcher="L",
                holder="h",
                takeover=False,
                rank=rank,
                world_size=WORLD,
                node=order[rank],
                replicas=1,
                persist=PersistRule(steps=1),
                start=start,
            )
            known = self.run.generation if rank else None
            try:
                self.run = register(self.run, wish, known, self.now_s, LIMITS).run
            except AlreadyExistsError:
                return

    def report(self, name, shards, ready, abandoned, accused):
        decision = self.run.decision
        number = decision.number if decision else 0
        self.sequence += 1
        inventory = Inventory(
            node=Peer(node=name, rpc_address="x:1", endpoints=tcp("x:2")),
            incarnation=1,
            sequence=self.sequence,
            # no shard of an attempt that has not been
            shards=tuple(
                item for item in shards if item.shard.id.generation <= self.run.generation
            ),
            ranks=tuple(
                rank_status(
                    job=JOB,
                    run=RUN,
                    generation=self.run.generation,
                    rank=rank.rank,
                    ready_decision=number if ready else 0,
                )
                for rank in self.run.ranks
                if rank.node == name
            ),
            abandoned=tuple(AbandonedStep(run=RUN, step=s, generation=g) for s, g in abandoned),
            bad_sources=tuple(BadSource(shard=k, source=s, decision=number) for k, s in accused),
        )
        self.nodes[name] = Node(
            inventory=inventory, reported_at_s=self.now_s, lease_until_s=self.now_s + 5.0
        )

    def check(self, before):
        run, decision = self.run, self.run.decision
        evidence = gather(RUN, tuple(self.nodes.values()), self.now_s, run.stored)
        self.check_drains(evidence)
        self.check_start(before)
        if decision and run.current and decision.state is DecisionState.PROPOSED:
            key = decision.checkpoint
            assert not run.superseded(key)
            assert {s.id.rank for s in decision.shards} == set(range(WORLD))
            assert {s.id.checkpoint for s in decision.shards} == {key}
            held = self.held_lately()
            row = next((row for row in run.checkpoints if row.id == key), None)
            in_memory = all(s in held for s in decision.shards)
            assert in_memory or row.stored, "expired or damaged objects were chosen"
            if row and row.stored:
                assert self.objects[key].shards == decision.shards, "not what the manifest says"
            assert key in run.pins
            assert key not in run.rejected
        if before.decision and before.decision.state is DecisionState.CONFIRMED:
            same_attempt = decision.generation == before.decision.generation
            assert not same_attempt or decision == before.decision
            chosen = before.decision.checkpoint
            assert chosen is None or any(row.id == chosen for row in run.checkpoints)
        over = run.attempt and run.attempt.start_due and run.attempt.spec.start.fresh
        begun = decision and decision.fresh and not (before.decision and before.decision.fresh)
        if begun and not over:
            assert not any(
                not row.expired and row.id.generation < run.generation and before.usable(row.id)
                for row in run.checkpoints
            ), "a fresh start over a known checkpoint"
        if decision and before.decision:
            assert decision.number >= before.decision.number
        known = {row.id: row for row in before.checkpoints}
        proposed = {d.checkpoint: d.shards for d in (before.decision, decision) if d}
        for row in run.checkpoints:
            if row.id in known:
                old = known[row.id]
                assert row.local_at_s == old.local_at_s
                assert old.replicated_at_s in (None, row.replicated_at_s)
                assert old.durable_at_s in (None, row.durable_at_s)
            else:
                proven = [i.shard for i in evidence.live.get(row.id, {}).values() if i.nodes]
                ranks = {shard.id.rank for shard in proposed.get(row.id) or proven}
                assert ranks == set(range(WORLD)), "a row of a checkpoint that is not whole"
                newest = row.id.generation == run.generation
                assert newest or row.id in proposed, "an old generation committed"

    def held_lately(self):
        """Shards that lie on a node by its last word, if that is not older than the wait."""
        return {
            item.shard
            for node in self.nodes.values()
            if node.reported_at_s > self.now_s - LIMITS.decide_wait_s
            for item in node.inventory.shards
            if item.state is HeldState.SEALED
        }

    def check_start(self, before):
        """ADR 0023: a start is made as asked, once per name; only a due one changes a choice."""
        run, attempt, decision = self.run, self.run.attempt, self.run.decision
        assert len(set(run.started)) == len(run.started)
        assert run.started[: len(before.started)] == before.started
        made = run.started[len(before.started) :]
        if not attempt:
            return
        if made:
            assert made == (attempt.spec.start.name,)
            assert decision.state is DecisionState.CONFIRMED
        assert not decision.refused or attempt.start_due
        if attempt.start_due and decision.checkpoint:
            assert decision.checkpoint.step == attempt.spec.start.step
        if attempt.start_due and decision.fresh:
            assert attempt.spec.start.fresh

    def check_drains(self, evidence):
        """P1, P2: what is on its way is whole, valid, held by somebody, and one at a time."""
        run = self.run
        assert len(run.drains) <= 1
        assert [d.checkpoint for d in run.drains] == [r.id for r in run.checkpoints if r.draining]
        for drain in run.drains:
            assert run.usable(drain.checkpoint)
            known = evidence.known.get(drain.checkpoint, {})
            assert all(known[shard.id].shard == shard for shard in drain.missing)
            ranks = {shard.id.rank for shard in self.on_their_way[drain.checkpoint]}
            assert ranks == set(range(WORLD))
            assert bool(drain.missing) == any(i.startswith("shard/") for i in items(run))
        durable = {row.id for row in run.checkpoints if row.durable_at_s is not None}
        assert durable == self.objects.keys(), "a durable row is never pushed out"


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(histories)
def test_a_decision_is_whole_and_valid_and_a_confirmed_one_never_changes(history):
    """P1, P2, F67, F68: invariants after every event of a random history, over all tiers."""
    catalogue = Catalogue()
    for event in history:
        catalogue.happen(event)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(histories, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_listed_decides_nothing(history, rng):
    """Any number of metadata processes: the same facts give the same decision and wants."""
    catalogue = Catalogue()
    for event in history:
        catalogue.happen(event)
    names = list(catalogue.nodes)
    rng.shuffle(names)
    shuffled = {name: catalogue.nodes[name] for name in names}

    ours = advance(catalogue.run, catalogue.nodes, catalogue.now_s + 1, LIMITS)
    theirs = advance(catalogue.run, shuffled, catalogue.now_s + 1, LIMITS)

    assert ours.run.decision == theirs.run.decision
    assert ours.run.checkpoints == theirs.run.checkpoints
