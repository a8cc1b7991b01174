"""A node that hosts a rank is a moment late: its steps are waited for, and used if they come."""

import pytest


@pytest.fixture
def late(cluster):
    """Step 20 lies twice on a and b, step 30 once; b is about to be away."""
    cluster.join("a", "b")
    first = cluster.launch(b"first", "a", "b")
    cluster.commit(20, first, "a", "b")
    cluster.hold("a", 30, first, 0)
    cluster.hold("b", 30, first, 1)
    cluster.report("a", "b")
    assert {(20, 1): "replicated", (30, 1): "local"} == cluster.levels()
    return cluster


def leave(cluster, node):
    cluster.machines[node].leaving = True
    cluster.report(node)


def come_back(cluster, node):
    """A new agent over the same arena."""
    cluster.machines[node].leaving = False
    cluster.machines[node].incarnation += 1
    cluster.report(node)


@pytest.mark.parametrize("way", ["left", "died"])
def test_a_committed_step_is_waited_for_while_a_rank_is_still_to_come(late, way):
    """P5, 4.8; defect A4: rank 0 is here, b's agent restarts and has the rest of step 30."""
    if way == "left":
        leave(late, "b")
    else:
        late.later(6.0)
    late.register(0, "a", nonce=b"second")
    late.report("a")
    assert late.decided() == ("PENDING", None)

    late.later(1.0)
    come_back(late, "b")
    late.register(1, "b", nonce=b"second")
    late.report("a", "b")

    assert late.decided() == ("PROPOSED", (30, 1))


@pytest.fixture
def known(cluster):
    """Step 20 lies twice on a and b, and nothing newer is known."""
    cluster.join("a", "b", "c")
    cluster.commit(20, cluster.launch(b"first", "a", "b"), "a", "b")
    return cluster


def test_a_step_of_which_a_part_was_seen_is_waited_for_too(known):
    """P5; defect A4: metadata was out when the last step was sealed; a has told its half."""
    known.hold("a", 40, 1, 0)
    known.report("a")
    leave(known, "b")
    known.register(0, "a", nonce=b"second")
    assert known.decided() == ("PENDING", None)

    known.hold("b", 40, 1, 1)
    come_back(known, "b")
    known.register(1, "b", nonce=b"second")
    known.report("a", "b")

    assert known.decided() == ("PROPOSED", (40, 1))


@pytest.mark.parametrize("node", ["b", "c"])
def test_who_hosts_a_rank_or_lives_may_have_what_nobody_knows_of(known, node):
    """P5, 4.8; defect A4: metadata was out when step 40 was sealed. b's lease is over, and it has
    a rank; c has a lease, and no rank."""
    known.hold(node, 40, 1, 0)
    known.hold(node, 40, 1, 1)
    known.later(6.0 if node == "b" else 1.0)
    for rank, host in enumerate("ab"):
        known.register(rank, host, nonce=b"second")
    known.report(*({"a", "b", "c"} - {node}))
    assert known.decided() == ("PENDING", None)

    known.report(node)

    assert known.decided() == ("PROPOSED", (40, 1))


@pytest.mark.parametrize(("expired", "decided"), [(False, "PENDING"), (True, "PROPOSED")])
def test_a_committed_step_whose_nodes_are_forgotten_is_waited_for_unless_it_expired(
    known, expired, decided
):
    """P5; defect A4: a node that has been away for long still comes with its segments."""
    known.launch(b"second", "b", "c")
    known.ready(("b", 0), ("c", 1))
    known.commit(30, 2, "b", "c")
    known.change(30, 2, expired=expired)
    known.later(6.0)
    del known.nodes["b"], known.nodes["c"]

    known.register(0, "a", nonce=b"third")
    known.report("a")

    assert decided == known.decided()[0]


def test_a_step_that_was_left_behind_is_not_waited_for(late):
    """4.8: the second attempt went back to step 20; what is newer is of no use to the third."""
    late.join("c")
    leave(late, "b")
    late.launch(b"second", "a", "c")
    for _ in range(2):
        late.later(3.0)
        late.report("a", "c")
    late.ready(("a", 0), ("c", 1))
    assert late.decided() == ("CONFIRMED", (20, 1))

    late.register(0, "a", nonce=b"third")

    assert late.decided() == ("PROPOSED", (20, 1))


def test_a_newer_step_that_nobody_serves_intact_replaces_no_proposal(late):
    """4.8: else each report would be another decision, and no rank ever ready for it."""
    late.later(6.0)
    late.join("c")
    late.report("a")
    late.launch(b"second", "a", "c")
    decision = late.run.decision
    late.accuse("c", 30, 1, 1, "b", decision.number)
    late.report("c")

    come_back(late, "b")

    assert decision == late.run.decision


def test_nobody_waits_longer_than_it_is_said(late):
    """4.8: after ``decide_wait_s`` the newest that can be had is proposed."""
    leave(late, "b")
    late.register(0, "a", nonce=b"second")
    for _ in range(3):
        late.report("a")
        assert late.decided() == ("PENDING", None)
        late.later(3.0)
    late.report("a")
    late.later(1.0)

    assert late.decided() == ("PROPOSED", (20, 1))


def test_all_ranks_elsewhere_wait_for_who_left_as_for_who_died(late):
    """P5: the attempt has moved on to c, and b's agent is being updated, not gone."""
    late.join("c")
    leave(late, "b")
    late.later(0.5)
    late.launch(b"second", "a", "c")
    assert late.decided() == ("PENDING", None)
    late.later(2.5)
    late.report("a", "c")
    late.later(2.5)
    late.report("a", "c")

    assert late.decided() == ("PROPOSED", (20, 1)), "its lease would be over by now"


def test_a_newer_step_that_a_node_brings_replaces_the_proposal(late):
    """P5, M2; defect A4: b comes back after the wait, before anything is confirmed."""
    late.later(6.0)
    late.join("c")
    late.report("a")
    late.launch(b"second", "a", "c")
    assert late.decided() == ("PROPOSED", (20, 1))
    number = late.run.decision.number
    late.ready(("a", 0))

    come_back(late, "b")

    assert late.decided() == ("PROPOSED", (30, 1))
    assert (number + 1, ()) == (late.run.decision.number, late.run.rejected)
    assert late.run.pins == (late.run.decision.checkpoint,)
    for _ in range(4):
        late.later(3.0)
        late.report("a", "c")
    assert late.decided() == ("PROPOSED", (20, 1)), "b is gone again"
    come_back(late, "b")
    assert late.decided() == ("PROPOSED", (30, 1)), "nobody has accused it"
    late.accuse("c", 30, 1, 1, "b", late.run.decision.number)
    late.report("c")
    late.report("b")
    assert late.decided() == ("PROPOSED", (20, 1)), "what was tried in vain is not tried again"
    late.ready(("a", 0), ("c", 1))
    come_back(late, "b")
    assert late.decided() == ("CONFIRMED", (20, 1))


@pytest.fixture
def once(cluster):
    """Step 10 lies once on a and b: the job wants no copies."""
    cluster.join("a", "b")
    first = cluster.launch(b"first", "a", "b", replicas=0)
    cluster.hold("a", 10, first, 0)
    cluster.hold("b", 10, first, 1)
    cluster.report("a", "b")
    return cluster


@pytest.fixture
def single(once):
    """Step 10 is proposed to the second attempt."""
    once.launch(b"second", "a", "b", replicas=0)
    assert once.decided() == ("PROPOSED", (10, 1))
    return once


@pytest.mark.parametrize("way", ["left", "died"])
def test_a_proposal_waits_for_its_only_source_that_restarts(single, way):
    """P5; defect X16: the arena is still there, but one report without b lost the attempt."""
    proposed = single.run.decision
    single.report("a")
    if way == "left":
        leave(single, "b")
    for _ in range(2):
        single.later(3.0)
        single.report("a")
    assert single.run.decision == proposed

    come_back(single, "b")
    single.ready(("a", 0), ("b", 1))

    assert single.decided() == ("CONFIRMED", (10, 1))


def test_a_source_that_does_not_come_back_is_waited_for_no_longer_than_it_is_said(single):
    """4.8: ``decide_wait_s`` after its last word, then the attempt is told what is missing."""
    leave(single, "b")
    for _ in range(3):
        single.later(3.0)
        single.report("a")
        assert single.decided() == ("PROPOSED", (10, 1))

    single.later(1.0)
    single.report("a")

    assert single.decided() == ("LOST", None)
    assert "last held by b" in single.run.decision.reason


def test_a_source_that_comes_back_without_its_shards_is_not_waited_for(single):
    """P5: its own word says that they are gone."""
    leave(single, "b")
    single.wipe("b")
    come_back(single, "b")

    assert single.decided() == ("LOST", None)


def test_a_source_that_was_accused_is_not_waited_for(single):
    """P3: its bytes do not match, and there is no other."""
    single.accuse("a", 10, 1, 1, "b", single.run.decision.number)
    single.report("a")

    assert single.decided() == ("LOST", None)


def test_a_node_that_went_with_other_bytes_is_no_hope_for_these(cluster):
    """P3: the owner may come back with another shard of that name than the one that is chosen."""
    cluster.join("a", "b", "c")
    cluster.launch(b"first", "a", "b", replicas=0)
    cluster.hold("a", 10, 1, 0)
    cluster.hold("b", 10, 1, 1, digest=b"2" * 16)
    cluster.hold("c", 10, 1, 1, owner="b")
    cluster.report("a", "b", "c")
    leave(cluster, "b")
    cluster.launch(b"second", "a", "c", replicas=0)
    cluster.later(6.0)
    cluster.report("a", "c")
    assert cluster.decided() == ("PROPOSED", (10, 1))

    cluster.accuse("a", 10, 1, 1, "c", cluster.run.decision.number)
    cluster.report("a")

    assert cluster.decided() == ("LOST", None)


def test_a_step_that_went_while_nothing_was_proposed_is_waited_for_too(once):
    """P5; defect X16: the wait for c is over at the moment when b's agent restarts."""
    once.later(1.0)
    once.register(0, "a", nonce=b"second", replicas=0)
    once.register(1, "c", nonce=b"second", replicas=0)
    for _ in range(3):
        once.later(3.0)
        once.report("a", "b")
    leave(once, "b")
    once.later(2.0)
    once.report("a")
    assert once.decided() == ("PENDING", None)

    come_back(once, "b")

    assert once.decided() == ("PROPOSED", (10, 1))
