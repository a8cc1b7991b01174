"""Restores through crashes, outages and liars: the interleavings that cost checkpoints."""


def fresh(cluster, *nodes, replicas=1, nonce=b"first"):
    """A first attempt that found no checkpoint."""
    cluster.join(*nodes)
    generation = cluster.launch(nonce, *nodes, replicas=replicas)
    assert cluster.run.decision.fresh
    return generation


def save(cluster, step, generation, nodes, *, copies=True):
    """Every node seals its rank's shard; with copies, the other node holds it too."""
    for rank, node in enumerate(nodes):
        cluster.hold(node, step, generation, rank, world=len(nodes))
        if copies:
            backup = nodes[(rank + 1) % len(nodes)]
            cluster.hold(backup, step, generation, rank, world=len(nodes), owner=node)
    cluster.report(*nodes)


def test_a_job_without_checkpoints_starts_fresh(cluster):
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")

    assert cluster.decided() == ("CONFIRMED", None)
    assert cluster.run.decision.fresh


def test_fresh_is_not_said_before_every_rank_has_registered(cluster):
    """A rank that is still to come may come with a node nobody knows, full of shards."""
    cluster.join("a")
    cluster.register(0, "a", world=2)
    cluster.report("a")
    assert cluster.decided() == ("PENDING", None)

    cluster.later(cluster.limits.decide_wait_s)

    assert cluster.run.decision.fresh


def test_two_attempts_that_sealed_the_same_step_are_never_mixed(cluster):
    """F68, P1: one shard of step 10 survives from each of two attempts; step 5 is whole."""
    first = fresh(cluster, "a", "b")
    save(cluster, 5, first, ("a", "b"))
    second = cluster.launch(b"second", "a", "b")
    cluster.ready(("a", 0), ("b", 1))
    assert cluster.decided() == ("CONFIRMED", (5, first))
    cluster.hold("a", 10, first, 0)
    cluster.hold("b", 10, second, 1)
    cluster.report("a", "b")
    assert (10, first) not in cluster.levels()
    assert (10, second) not in cluster.levels()

    cluster.launch(b"third", "a", "b")

    assert cluster.decided() == ("PROPOSED", (5, first))
    assert {s.id.generation for s in cluster.run.decision.shards} == {first}


def test_a_corrupt_last_source_moves_all_ranks_to_the_older_step(cluster):
    """F69: rank 0 is ready for step 100 when rank 1's last source turns out corrupt."""
    first = fresh(cluster, "a", "b")
    save(cluster, 99, first, ("a", "b"))
    save(cluster, 100, first, ("a", "b"), copies=False)
    cluster.wipe("b")
    cluster.hold("a", 100, first, 1, owner="b")
    cluster.launch(b"second", "a", "b")
    assert cluster.decided() == ("PROPOSED", (100, first))
    number = cluster.run.decision.number
    cluster.ready(("a", 0))

    cluster.accuse("b", 100, first, 1, "a", number)
    cluster.report("b")

    assert cluster.decided() == ("PROPOSED", (99, first))
    assert cluster.run.decision.number == number + 1
    assert cluster.run.pins == (cluster.run.decision.checkpoint,)
    cluster.report("a")
    assert cluster.decided()[0] == "PROPOSED", "readiness for the old number does not count"
    cluster.ready(("a", 0), ("b", 1))
    assert cluster.decided() == ("CONFIRMED", (99, first))


def test_an_accusation_counts_for_the_accuser_and_the_decision_alone(cluster):
    """One node with a bad cable must not take a good source from everybody."""
    first = fresh(cluster, "a", "b")
    save(cluster, 7, first, ("a", "b"))
    cluster.join("c")
    cluster.launch(b"second", "a", "c")
    number = cluster.run.decision.number

    cluster.accuse("c", 7, first, 0, "a", number)
    cluster.accuse("c", 7, first, 1, "a", number - 1)
    cluster.report("c")

    assert cluster.decided() == ("PROPOSED", (7, first))
    sources = {
        want.shard.id.rank: {source.node for source in want.sources}
        for want in cluster.view("c").wants
    }
    assert sources == {0: {"b"}, 1: {"a", "b"}}


def test_a_quarantined_copy_is_no_source(cluster):
    """F70."""
    first = fresh(cluster, "a", "b", replicas=0)
    save(cluster, 3, first, ("a", "b"), copies=False)
    save(cluster, 4, first, ("a", "b"), copies=False)
    cluster.launch(b"second", "a", "b", replicas=0)
    assert cluster.decided() == ("PROPOSED", (4, first))

    cluster.hold("b", 4, first, 1, state=2)
    cluster.report("b")

    assert cluster.decided() == ("PROPOSED", (3, first))


def test_the_newest_save_of_an_outage_is_restored(cluster):
    """P5, G18: the new attempt registers before any inventory of the outage has arrived.

    After ten saves with two slots each rank holds the committed step and the newest (4.7).
    """
    first = fresh(cluster, "a", "b")
    save(cluster, 10, first, ("a", "b"))
    for rank, node in enumerate(("a", "b")):
        cluster.hold(node, 20, first, rank)
        cluster.hold(("b", "a")[rank], 20, first, rank, owner=node)
    cluster.now_s += 60.0
    for name, node in cluster.nodes.items():  # as the pulse does after a gap
        cluster.nodes[name] = type(node)(
            inventory=node.inventory,
            reported_at_s=node.reported_at_s,
            lease_until_s=cluster.now_s + cluster.limits.node_lease_s,
        )

    cluster.register(0, "a", nonce=b"second")
    cluster.register(1, "b", nonce=b"second")
    assert cluster.decided() == ("PENDING", None)
    cluster.report("a")
    assert cluster.decided() == ("PENDING", None)
    cluster.report("b")

    assert cluster.decided() == ("PROPOSED", (20, first))
    cluster.ready(("a", 0), ("b", 1))
    assert cluster.levels()[(20, first)] in ("local", "replicated")


def test_a_restore_is_proposed_before_all_ranks_are_up(cluster):
    """F68: nodes alone are enough to propose; ranks are needed to confirm."""
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    cluster.register(0, "a", nonce=b"second")
    cluster.report("a", "b")

    assert cluster.decided() == ("PROPOSED", (8, first))
    cluster.ready(("a", 0))
    assert cluster.decided()[0] == "PROPOSED"


def test_nothing_is_freed_while_a_restore_is_decided(cluster):
    """4.7: until it is confirmed every older step may still be needed."""
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    assert cluster.view("a").runs[0].free_before.step == 8

    cluster.launch(b"second", "a", "b")
    assert cluster.view("a").runs[0].free_before is None

    cluster.ready(("a", 0), ("b", 1))
    assert cluster.view("a").runs[0].free_before.step == 8


def test_a_cut_off_node_that_returns_with_newer_shards_is_superseded(cluster):
    """P2: step 20 was whole on a and b; b was cut off, step 10 was restored without it."""
    first = fresh(cluster, "a", "b")
    save(cluster, 10, first, ("a", "b"))
    save(cluster, 20, first, ("a", "b"), copies=False)
    cluster.later(6.0)
    cluster.join("c")
    cluster.report("a")
    second = cluster.launch(b"second", "a", "c")
    assert cluster.decided() == ("PROPOSED", (10, first))
    cluster.hold("c", 10, first, 0, owner="a")
    cluster.hold("c", 10, first, 1, owner="b")
    cluster.ready(("a", 0), ("c", 1))
    assert cluster.decided() == ("CONFIRMED", (10, first))
    assert "checkpoint_superseded" in cluster.kinds()

    cluster.report("b")
    assert cluster.decided() == ("CONFIRMED", (10, first))
    cluster.launch(b"third", "a", "c")

    assert cluster.decided() == ("PROPOSED", (10, first))
    assert cluster.run.superseded(cluster.run.checkpoints[0].id), "step 20 is shown, not chosen"
    assert second < cluster.run.generation


def test_a_lost_restore_says_what_is_missing_and_who_had_it(cluster):
    """P5: checkpoints are known, none can be read: never a silent start from step 0."""
    first = fresh(cluster, "a", "b", replicas=0)
    save(cluster, 10, first, ("a", "b"), copies=False)
    cluster.later(cluster.limits.decide_wait_s)
    cluster.report("a")
    cluster.register(0, "a", world=1, nonce=b"second", replicas=0)
    cluster.report("a")

    assert cluster.decided() == ("LOST", None)
    reason = cluster.run.decision.reason
    assert reason == f"step 10 of attempt {first} lacks the shards of ranks 1; last held by b"
    cluster.report("b")
    assert cluster.decided() == ("LOST", None), "a lost decision is final for its attempt"


def test_starting_over_after_a_lost_restore_leaves_behind_what_returns_later(cluster):
    """ADR 0013: consent to lose the old steps is a fresh start, whoever comes back with them."""
    first = fresh(cluster, "a", "b", replicas=0)
    save(cluster, 900, first, ("a", "b"), copies=False)
    cluster.later(cluster.limits.decide_wait_s)
    cluster.report("a")
    second = cluster.register(0, "a", world=1, nonce=b"second", replicas=0)
    cluster.report("a")
    assert cluster.decided() == ("LOST", None)

    cluster.status("a", 0, generation=second, loaded=True)
    cluster.hold("a", 5, second, 0, world=1)
    cluster.report("a")
    cluster.report("b")
    cluster.launch(b"third", "a", replicas=0, world=1)

    assert cluster.decided() == ("PROPOSED", (5, second))


def test_a_step_that_never_was_whole_does_not_stop_a_fresh_start(cluster):
    """A crash in the very first save leaves a part of a step, which nobody was promised."""
    first = fresh(cluster, "a", "b")
    cluster.hold("a", 1, first, 0)
    cluster.report("a")

    cluster.launch(b"second", "a", "b")

    assert cluster.run.decision.fresh
    assert cluster.decided()[0] == "CONFIRMED"


def test_the_pin_is_released_when_all_ranks_have_loaded(cluster):
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    cluster.launch(b"second", "a", "b")
    cluster.ready(("a", 0), ("b", 1))
    pinned = cluster.view("a").runs[0].pinned
    cluster.status("a", 0, loaded=True)
    cluster.report("a")
    assert cluster.view("a").runs[0].pinned == pinned
    assert len(cluster.view("b").runs[0].decision.shards) == 2
    assert cluster.view("a").runs[0].decision.shards == ()

    cluster.status("b", 1, loaded=True)
    cluster.report("b")

    assert len(pinned) == 1
    assert cluster.view("a").runs[0].pinned == ()
    assert cluster.view("a").runs[0].decision.shards == ()


def test_a_confirmed_restore_never_changes_whatever_comes_after(cluster):
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    cluster.launch(b"second", "a", "b")
    cluster.ready(("a", 0), ("b", 1))
    confirmed = cluster.run.decision

    save(cluster, 9, first, ("a", "b"))
    cluster.accuse("a", 8, first, 1, "b", confirmed.number)
    cluster.wipe("b")
    cluster.report("a", "b")
    cluster.later(60.0)

    assert cluster.run.decision == confirmed


def test_restore_wants_name_only_what_a_host_does_not_hold(cluster):
    """F67, G3: the replacement node fetches both shards, the survivor nothing it has."""
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    cluster.join("c")
    cluster.launch(b"second", "a", "c")

    wants = cluster.view("c").wants

    assert [(w.shard.id.rank, w.reason.name) for w in wants] == [(0, "RESTORE"), (1, "RESTORE")]
    assert all({source.node for source in w.sources} == {"a", "b"} for w in wants)
    assert cluster.view("a").wants == ()
    assert cluster.view("b").wants == ()


def bad_without_b(cluster):
    """A catalogue that does not know node b proposes step 8; node a's own part turns out bad."""
    first = fresh(cluster, "a", "b")
    save(cluster, 8, first, ("a", "b"))
    cluster.forget()
    cluster.hold("a", 8, first, 1, owner="b")
    cluster.register(0, "a", world=1, nonce=b"second", generation_min=first)
    cluster.report("a")
    assert cluster.decided() == ("PROPOSED", (8, first))
    cluster.hold("a", 8, first, 0, state=2)
    cluster.report("a")
    return first


def test_a_node_that_a_copy_is_of_and_nobody_knows_is_awaited(cluster):
    """P5, seed 21262: a catalogue from a moment ago; who has reported since has the good copy."""
    first = bad_without_b(cluster)
    assert cluster.decided() == ("PENDING", None)

    cluster.report("b")

    assert cluster.decided() == ("PROPOSED", (8, first))


def test_a_node_that_nobody_knows_is_not_awaited_for_ever(cluster):
    """Then the job is lost."""
    bad_without_b(cluster)

    cluster.later(cluster.limits.decide_wait_s)

    assert cluster.decided() == ("LOST", None)


def test_a_proposal_that_a_bad_copy_ended_is_lost_and_never_a_fresh_start(cluster):
    """P5, P6: of step 8 the catalogue has only what it proposed; no node delivers it any more."""
    first = bad_without_b(cluster)

    cluster.now_s += cluster.limits.decide_wait_s
    cluster.report("a")

    text = f"step 8 of attempt {first} lacks the shards of ranks 0; last held by an unknown node"
    assert cluster.run.decision.reason == text
    assert not cluster.run.decision.fresh
    assert (8, first) in cluster.levels()
