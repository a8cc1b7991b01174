"""Whatever the nodes say, in whatever order: what a decision may name and what never changes."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.facts import (
    AbandonedStep,
    BadSource,
    DecisionState,
    HeldShard,
    HeldState,
    Inventory,
    Peer,
    RankStatus,
    Shard,
)
from holdfast.core.ids import ShardId
from holdfast.errors import AlreadyExistsError
from holdfast_services.metadata.domain.advance import advance
from holdfast_services.metadata.domain.attempts import Registration, register
from holdfast_services.metadata.domain.evidence import gather
from holdfast_services.metadata.domain.model import Limits, Node, Run

RUN, JOB, WORLD = "run0", "job", 2
NODES = ("a", "b", "c")
LIMITS = Limits(node_lease_s=5.0, decide_wait_s=10.0)

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
    st.lists(st.tuples(shard_ids, st.sampled_from(NODES)), max_size=2),  # accusations
)
launches = st.tuples(st.just("launch"), st.permutations(NODES))
waits = st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 6.0, 11.0]))
histories = st.lists(st.one_of(reports, reports, launches, waits), min_size=5, max_size=30)


class Catalogue:
    """The run and its nodes; ``check`` holds after every event."""

    def __init__(self):
        self.now_s = 100.0
        self.run = Run(id=RUN, job=JOB)
        self.nodes = {}
        self.sequence = 0
        self.launches = 0

    def happen(self, event):
        before = self.run
        {"report": self.report, "launch": self.launch, "wait": self.wait}[event[0]](*event[1:])
        outcome = advance(self.run, self.nodes, self.now_s, LIMITS)
        self.run = outcome.run
        self.check(before)

    def wait(self, seconds):
        self.now_s += seconds

    def launch(self, order):
        self.launches += 1
        nonce = str(self.launches).encode()
        for rank in range(WORLD):
            wish = Registration(
                job=JOB,
                nonce=nonce,
                launcher="L",
                holder="h",
                takeover=False,
                rank=rank,
                world_size=WORLD,
                node=order[rank],
                replicas=1,
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
            node=Peer(node=name, rpc_address="x:1", data_address="x:2"),
            incarnation=1,
            sequence=self.sequence,
            # no shard of an attempt that has not been
            shards=tuple(
                item for item in shards if item.shard.id.generation <= self.run.generation
            ),
            ranks=tuple(
                RankStatus(
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
            bad_sources=tuple(BadSource(shard=k, node=n, decision=number) for k, n in accused),
        )
        self.nodes[name] = Node(
            inventory=inventory, reported_at_s=self.now_s, lease_until_s=self.now_s + 5.0
        )

    def check(self, before):
        run, decision = self.run, self.run.decision
        evidence = gather(RUN, tuple(self.nodes.values()), self.now_s)
        if decision and decision.state is DecisionState.PROPOSED:
            key = decision.checkpoint
            assert not run.superseded(key)
            assert {s.id.rank for s in decision.shards} == set(range(WORLD))
            assert {s.id.checkpoint for s in decision.shards} == {key}
            live = evidence.live[key]
            assert all(live[s.id].nodes and live[s.id].shard == s for s in decision.shards)
            assert key in run.pins
            assert key not in run.rejected
        if before.decision and before.decision.state is DecisionState.CONFIRMED:
            same_attempt = decision.generation == before.decision.generation
            assert not same_attempt or decision == before.decision
            chosen = before.decision.checkpoint
            assert chosen is None or any(row.id == chosen for row in run.checkpoints)
        if decision and before.decision:
            assert decision.number >= before.decision.number
        known = {row.id: row for row in before.checkpoints}
        for row in run.checkpoints:
            if row.id in known:
                old = known[row.id]
                assert row.local_at_s == old.local_at_s
                assert old.replicated_at_s in (None, row.replicated_at_s)
            else:
                ranks = {k.rank for k in evidence.live[row.id]}
                assert ranks == set(range(WORLD)), "a row of a checkpoint that is not whole"
                newest = row.id.generation == run.generation
                assert newest or row.id == decision.checkpoint, "an old generation committed"


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(histories)
def test_a_decision_is_whole_and_valid_and_a_confirmed_one_never_changes(history):
    """P1, P2, F68: invariants after every event of a random history."""
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
