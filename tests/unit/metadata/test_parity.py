"""Parity in the catalogue's rules: what is planned, what commits, what is restorable and freed."""

from __future__ import annotations

from itertools import combinations

import pytest

from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import HeldElement
from holdfast.core.needs import Needs, ShardNeed
from holdfast.core.node_view import WantReason
from holdfast.core.protection import Parity
from holdfast.core.sources import Memory, Rebuilt
from holdfast.core.stripes import Element, Stripe
from holdfast_services.metadata.domain.shortage import domains_of, spread

from .conftest import RUN, shard

FOUR = tuple("abcd")


ONE = Parity(2, 1)


def launch(cluster, *nodes, parity=ONE, nonce=b"first", spare=()):
    cluster.join(*nodes, *spare)
    generation = cluster.launch(nonce, *nodes, replicas=0, parity=parity)
    begin(cluster, nodes)
    return generation


def begin(cluster, nodes):
    if cluster.run.decision.state.name == "PROPOSED":
        cluster.ready(*((node, rank) for rank, node in enumerate(nodes)))
    for rank, node in enumerate(nodes):
        cluster.status(node, rank, loaded=True)
    cluster.report(*nodes)


def save(cluster, step, generation, *nodes):
    """Each rank saves; nothing else is done yet."""
    for rank, node in enumerate(nodes):
        cluster.hold(node, step, generation, rank, world=len(nodes))
    cluster.report(*nodes)


def make(cluster, *names):
    """These nodes make what they are asked for, till nothing is asked any more."""
    while sum(_make(cluster, name) for name in names):
        pass


def _make(cluster, name):
    wants = cluster.view(name).elements
    for want in wants:
        cluster.machine(name).elements[want.element.key] = HeldElement(
            element=want.element, root_digest=b"e" * 16, slot_incarnation=1
        )
    if wants:
        cluster.report(name)
    return bool(wants)


def lose(cluster, *names):
    for name in names:
        del cluster.machines[name]
    cluster.later(6.0)


def wanted(cluster):
    return {
        node: [(w.element.number, [s.id.rank for s in w.element.stripe.members])
               for w in cluster.view(node).elements]
        for node in cluster.machines
    }  # fmt: skip


def test_a_local_step_is_summed_up_and_then_replicated(cluster):
    """G4: groups of the ring; elements lie outside of their group; no copy is asked for."""
    generation = launch(cluster, *FOUR)
    assert cluster.view("a").runs[0].copies.n == 0
    save(cluster, 1, generation, *FOUR)
    assert {(1, generation): "local"} == cluster.levels()
    assert wanted(cluster) == {"a": [(0, [2, 3])], "b": [], "c": [(0, [0, 1])], "d": []}

    _make(cluster, "c")
    assert {(1, generation): "local"} == cluster.levels(), "of each stripe"
    _make(cluster, "a")
    assert {(1, generation): "replicated"} == cluster.levels()
    assert not any(wanted(cluster).values())
    assert cluster.view("a").runs[0].free_before == CheckpointId(RUN, 1, generation)


def test_a_stripe_that_was_begun_goes_on_where_it_was(cluster):
    generation = launch(cluster, *FOUR, parity=Parity(2, 2))
    save(cluster, 1, generation, *FOUR)
    before = wanted(cluster)
    assert before == {
        "a": [(0, [2, 3])], "b": [(1, [2, 3])], "c": [(0, [0, 1])], "d": [(1, [0, 1])],
    }  # fmt: skip
    _make(cluster, "c")
    assert {**before, "c": []} == wanted(cluster)


def test_elements_are_acknowledged_with_holders_that_know_of_the_commit(cluster):
    """4.7: who has not heard may replace its shard, and with it the stripe's worth."""
    cluster.deaf = {"b"}
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    assert {(1, generation): "replicated"} == cluster.levels()
    assert cluster.view("a").runs[0].free_before is None
    cluster.deaf = set()
    cluster.report("b")
    assert cluster.view("a").runs[0].free_before == CheckpointId(RUN, 1, generation)


@pytest.mark.parametrize("lost", [*combinations(FOUR, 1), *combinations(FOUR, 2)])
def test_as_many_losses_as_elements_leave_a_step_to_restore(cluster, lost):
    generation = launch(cluster, *FOUR, parity=Parity(2, 2))
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, *lost)
    left = [name for name in FOUR if name not in lost]
    hosts = [*left, *(f"new-{name}" for name in lost)]
    cluster.join(*hosts)
    cluster.launch(b"second", *hosts, replicas=0, parity=Parity(2, 2))
    assert ("PROPOSED", (1, generation)) == cluster.decided()
    for host in hosts:
        held = set(cluster.machine(host).shards)
        wants = {want.shard.id: want for want in cluster.view(host).wants}
        needed = {shard(1, generation, rank, world=4).id for rank in range(4)} - held
        assert needed == set(wants)
        for want in wants.values():
            assert WantReason.RESTORE is want.reason
            source = want.sources[-1]
            holders = [s for s in want.sources if isinstance(s, Memory)]
            assert holders or isinstance(source, Rebuilt)
            if not holders:
                assert len(source.pieces) >= len(source.stripe.members)


def test_more_losses_than_elements_name_the_ranks_and_the_older_whole_step(cluster):
    """Two losses with m=1: the newest step that is still whole is taken, else ranks are named."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "a", "b")
    cluster.join("e", "f")
    cluster.launch(b"second", "c", "d", "e", "f", replicas=0, parity=Parity(2, 1))
    cluster.later(11.0)
    cluster.report("c", "d", "e", "f")
    cluster.later(11.0)
    state, key = cluster.decided()
    assert ("LOST", None) == (state, key)
    assert "ranks 0, 1" in cluster.run.decision.reason


def test_one_lost_member_is_made_again_from_its_stripe_whoever_needs_it(cluster):
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "b")
    cluster.join("e")
    cluster.launch(b"second", "a", "e", "c", "d", replicas=0, parity=Parity(2, 1))
    [want] = [w for w in cluster.view("e").wants if w.shard.id.rank == 1]
    [source] = want.sources
    assert [(p.is_element, p.number, p.nodes) for p in source.pieces] == [
        (False, 0, ("a",)), (True, 0, ("c",)),
    ]  # fmt: skip


def test_a_stripe_that_was_blamed_is_no_source_any_more(cluster):
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "b")
    cluster.join("e")
    cluster.launch(b"second", "a", "e", "c", "d", replicas=0, parity=Parity(2, 1))
    cluster.later(5.0)  # "b" is not hoped for any more
    cluster.report("a", "e", "c", "d")
    stripe = next(s for s in cluster.view("e").wants if s.shard.id.rank == 1).sources[0].stripe
    cluster.accuse("e", 1, generation, 1, Rebuilt(stripe), cluster.run.decision.number)
    cluster.report("e")
    assert cluster.decided()[1] is None


def test_too_few_nodes_allow_a_smaller_protection_and_say_so(cluster):
    """F54: (4, 2) on four nodes is (2, 1); steps stay local, older ones go by what is allowed."""
    generation = launch(cluster, *FOUR, parity=Parity(4, 2))
    [event] = [e for e in cluster.events if e.kind == "replication_cut"]
    assert "Parity(4, 2) needs 6 live nodes, but only 4 are there" in event.message
    assert cluster.run.attempt.allowed == Parity(2, 1)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    assert {(1, generation): "local"} == cluster.levels()
    assert cluster.view("a").runs[0].free_before == CheckpointId(RUN, 1, generation)
    assert "Parity(4, 2) needs 6" in cluster.view("a").runs[0].shortage


def test_after_a_restore_groups_are_formed_anew_and_old_elements_are_spare(cluster):
    """A stripe two of whose members lie on one node does not survive its loss."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "b")
    hosts = ("a", "c", "d")
    cluster.launch(b"second", "a", "a", "c", "d", replicas=0, parity=Parity(2, 1))
    for rank, (node, owner) in enumerate(zip("aacd", "aacd", strict=True)):
        cluster.hold(node, 1, generation, rank, world=4, owner=owner)
    cluster.report(*hosts)
    begin(cluster, ("a", "a", "c", "d"))
    plan = {node: wants for node, wants in wanted(cluster).items() if wants}
    assert plan
    make(cluster, *hosts)
    evidence = cluster.world().evidence[RUN]
    key = CheckpointId(RUN, 1, generation)
    safe = set()
    for held in evidence.stripes[key]:
        holders = lambda s: evidence.live[key][s.id].nodes  # noqa: E731
        if held.survives(Parity(2, 1), holders, {}):
            safe |= {s.id.rank for s in held.stripe.members}
    assert safe == {0, 1, 2, 3}
    spare = [k for node in hosts for k in cluster.view(node).spare_elements]
    assert len(spare) == 1, "the stripe of two shards on one node"


def test_elements_alone_tell_a_lost_catalogue_of_a_step(cluster):
    """P6: all members were lost with their nodes."""
    generation = launch(cluster, "a", "b", parity=Parity(2, 2), spare=("c", "d"))
    save(cluster, 1, generation, "a", "b")
    make(cluster, *FOUR)
    lose(cluster, "a", "b")
    cluster.forget()
    cluster.join("c", "d")
    cluster.launch(b"second", "c", "d", replicas=0, parity=Parity(2, 1), generation_min=generation)
    cluster.report("c", "d")
    assert ("PROPOSED", (1, generation)) == cluster.decided()


def test_elements_that_disagree_with_most_are_not_counted(cluster):
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    members = tuple(shard(1, generation, rank, world=4) for rank in (0, 1))
    element = Element(stripe=Stripe(members=members, elements_count=1), number=0)
    for name, root in zip("cda", (b"x" * 16, b"e" * 16, b"e" * 16), strict=True):
        cluster.machine(name).elements[element.key] = HeldElement(
            element=element, root_digest=root, slot_incarnation=1
        )
    cluster.report(*"cda")
    [held] = cluster.world().evidence[RUN].stripes[CheckpointId(RUN, 1, generation)]
    assert [(piece.nodes, piece.root_digest) for piece in held.elements] == [
        (("a", "d"), b"e" * 16)
    ]


def safe(cluster, step, generation):
    """Tell whether each shard outlives as many losses as are asked for."""
    world = cluster.world()
    evidence, key = world.evidence[RUN], CheckpointId(RUN, step, generation)
    copies, stripes = evidence.live[key], evidence.stripes.get(key, ())
    return spread(cluster.run.attempt.allowed, copies, domains_of(world.live.values()), stripes)


def give_back(cluster, *names):
    """Each of these nodes wants room at once, and gives back all that it was told nothing needs."""
    views = {name: cluster.view(name) for name in names}
    for name, view in views.items():
        machine = cluster.machine(name)
        machine.shards = {k: v for k, v in machine.shards.items() if k not in view.spares}
        machine.elements = {
            k: v for k, v in machine.elements.items() if k not in view.spare_elements
        }
    cluster.report(*names)


def begin_again(cluster, lost, seats, *, joining=(), everything=False):
    """Nodes are lost after step 1, the next launch has restored it, and elements are made anew."""
    first = [name for name in FOUR if name not in lost]
    hosts = (*first, *joining)
    lose(cluster, *lost)
    cluster.join(*hosts)
    cluster.launch(b"second", *seats, replicas=0, parity=Parity(2, 1))
    generation = cluster.run.decision.checkpoint.generation
    for rank, node in enumerate(seats):
        for needed in range(len(seats)) if everything else (rank,):
            if (
                shard(1, generation, needed, world=len(seats)).id
                not in cluster.machine(node).shards
            ):
                cluster.hold(
                    node, 1, generation, needed, world=len(seats),
                    owner=FOUR[needed] if FOUR[needed] in hosts else node,
                )  # fmt: skip
    cluster.report(*hosts)
    begin(cluster, seats)
    make(cluster, *hosts)
    return hosts, generation


def test_an_element_that_lies_beside_a_member_is_made_again_elsewhere(cluster):
    """A rank has come to where the element of its stripe lies: one loss would take both."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    hosts, generation = begin_again(cluster, "b", ("a", "c", "c", "d"))
    assert safe(cluster, 1, generation)
    give_back(cluster, *hosts)
    assert safe(cluster, 1, generation)
    assert 2 == sum(len(cluster.machine(host).elements) for host in hosts), "no more than it takes"


@pytest.mark.parametrize("seats", ["aecd", "aacd", "addc", "eacd"])
def test_copies_and_elements_are_not_given_back_for_each_other(cluster, seats):
    """Each rank loads all of it, so each node has copies of all: these, or elements, are enough."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    joining = {*seats}.difference(FOUR)
    hosts, generation = begin_again(cluster, "b", seats, joining=joining, everything=True)
    assert safe(cluster, 1, generation)
    for _ in range(2):
        give_back(cluster, *hosts)
        assert safe(cluster, 1, generation)


def test_stripes_over_the_same_shards_are_not_given_back_for_each_other(cluster):
    """Groups were formed anew while a node was away, which comes back with what it had."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    for ranks, node in (((0, 2), "b"), ((1, 3), "a"), ((0, 3), "c"), ((1, 2), "d")):
        members = tuple(shard(1, generation, rank, world=4) for rank in ranks)
        element = Element(stripe=Stripe(members=members, elements_count=1), number=0)
        cluster.machine(node).elements[element.key] = HeldElement(
            element=element, root_digest=b"e" * 16, slot_incarnation=1
        )
    cluster.report(*FOUR)
    give_back(cluster, *FOUR)
    assert safe(cluster, 1, generation)
    assert 2 == sum(len(cluster.machine(name).elements) for name in FOUR)


def test_heads_that_nobody_has_are_named_to_those_who_have_yet_to_say_what_they_need(cluster):
    """A rank that finds no head of a shard needs all of the checkpoint, and may have no room."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "b")
    cluster.join("a", "c", "d")
    cluster.launch(b"second", "a", "c", replicas=0, parity=Parity(2, 1))
    for rank, node in enumerate("ac"):
        cluster.status(node, rank, names_needs=True)
        cluster.report(node)
    assert ("PROPOSED", (1, generation)) == cluster.decided()
    key = CheckpointId(RUN, 1, generation)
    for node in "ac":
        [want] = cluster.view(node).wants
        assert (WantReason.HEAD, 1) == (want.reason, want.shard.id.rank)
        assert isinstance(want.sources[0], Rebuilt)

    needs = Needs(checkpoint=key, shards=(ShardNeed(rank=1), ShardNeed(rank=3)))
    cluster.status("a", 0, needs=needs)
    cluster.report("a")
    wants = [(want.reason, want.shard.id.rank) for want in cluster.view("a").wants]
    assert [(WantReason.RESTORE, 1), (WantReason.RESTORE, 3)] == wants
    assert not cluster.view("d").wants, "no rank is there"


def test_a_node_with_an_element_that_may_only_be_restarting_is_waited_for(cluster):
    """4.8: as for copies, what is proposed stays while a source may come back, and no longer."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    make(cluster, *FOUR)
    lose(cluster, "b")
    cluster.join("a", "c", "d", "e")
    cluster.launch(b"second", "a", "e", "d", "d", replicas=0, parity=Parity(2, 1))
    assert ("PROPOSED", (1, generation)) == cluster.decided()

    cluster.later(6.0)  # the lease of "c", which has the element over ranks 0 and 1, is over
    cluster.report("a", "d", "e")
    assert ("PROPOSED", (1, generation)) == cluster.decided()
    number = cluster.run.decision.number
    cluster.report("c")
    assert 1 in {want.shard.id.rank for want in cluster.view("e").wants if want.sources}
    assert number == cluster.run.decision.number

    cluster.later(11.0)
    cluster.report("a", "d", "e")
    assert ("LOST", None) == cluster.decided()


def test_lost_shards_are_made_again_where_their_ranks_are(cluster):
    """Each on a node of its own, as in its sum: else one gets them all, and has no room left."""
    six = tuple("abcdef")
    generation = launch(cluster, *six)
    save(cluster, 1, generation, *six)
    make(cluster, *six)
    for name in "bd":
        ranks = cluster.machine(name).ranks
        cluster.wipe(name)
        cluster.machine(name).ranks = ranks
    cluster.report(*six)
    wants = {name: [w.shard.id.rank for w in cluster.view(name).wants] for name in six}
    assert wants == {"a": [], "b": [1], "c": [], "d": [3], "e": [], "f": []}


def test_no_element_is_made_while_a_restore_is_decided(cluster):
    """It would take the room that what is restored needs."""
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    assert any(wanted(cluster).values())
    cluster.launch(b"second", *FOUR, replicas=0, parity=ONE)
    assert ("PROPOSED", (1, generation)) == cluster.decided()
    assert not any(wanted(cluster).values())
    begin(cluster, FOUR)
    assert any(wanted(cluster).values())


def test_no_element_is_made_of_a_step_that_lacks_a_shard(cluster):
    generation = launch(cluster, *FOUR)
    save(cluster, 1, generation, *FOUR)
    del cluster.machine("d").shards[shard(1, generation, 3, world=4).id]
    cluster.report("d")
    assert not any(wanted(cluster).values())
