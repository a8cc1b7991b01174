"""An attempt that trains while the catalogue is lost is taken in again (P6)."""

from dataclasses import replace

import pytest

from holdfast.core.decision import DecisionState, Start
from holdfast.errors import InvalidRequestError, StaleGenerationError
from holdfast_services.metadata.domain.advance_run import advance


@pytest.fixture
def training(cluster, checkpoint):
    """Generation 1 saved step 10; generation 2 restored it, went on and lost the catalogue."""
    cluster.join("a", "b")
    cluster.launch(b"first", "a", "b")
    cluster.commit(10, 1, "a", "b")
    cluster.launch(b"second", "a", "b")
    cluster.ready(("a", 0), ("b", 1))
    for rank, node in enumerate("ab"):
        cluster.status(node, rank, loaded=True)
    cluster.report("a", "b")
    assert cluster.decided() == ("CONFIRMED", (10, 1))
    cluster.restored = checkpoint(10, 1)
    return cluster


def again(cluster, rank, node, nonce=b"second", generation=2, **wishes):
    """A rank that trains registers once more, and goes on training."""
    wishes = {"restored": cluster.restored, **wishes}
    given = cluster.register(rank, node, nonce=nonce, generation=generation, **wishes)
    cluster.status(node, rank, loaded=True)
    return given


def test_steps_of_an_attempt_that_trains_are_committed_again(training):
    """P5, P6: until its ranks have registered nothing is, and nothing is freed."""
    training.forget()
    training.commit(20, 2, "a", "b")
    assert training.levels() == {}
    assert training.view("a").runs[0].attempt == 0

    assert [again(training, rank, node) for rank, node in enumerate("ab")] == [2, 2]
    training.report("a", "b")

    assert training.levels() == {(20, 2): "replicated", (10, 1): "replicated"}
    assert training.view("a").runs[0].attempt == 2
    assert training.view("a").runs[0].free_before.step == 20
    assert "attempt_readmitted" in training.kinds()
    assert training.launch(b"third", "a", "b") == 3
    assert training.decided() == ("PROPOSED", (20, 2))


def test_what_it_had_restored_is_known_again(training, checkpoint):
    """4.8: so are the parent of its steps, and what that restore has left behind."""
    training.forget()
    again(training, 0, "a")
    training.commit(20, 2, "a", "b")

    assert training.decided() == ("CONFIRMED", (10, 1))
    assert training.row(20, 2).parent == checkpoint(10, 1)
    assert training.run.superseded(checkpoint(11, 1))
    assert not training.run.superseded(checkpoint(10, 1))


def test_nobody_is_told_to_load_what_no_one_can_name(training):
    """S3: before nodes have reported a rank that had not loaded gets no list, and is not ready."""
    training.forget()
    again(training, 0, "a")

    assert training.run.decision.shards == ()
    assert not training.run.decision.fresh


def test_a_rank_that_had_not_loaded_is_told_the_shards_once_nodes_have_reported(training):
    """P5, M2: its mate knows the step alone, and both would wait for ever; the number is new."""
    training.forget()
    training.register(1, "b", nonce=b"second", generation=2, restored=training.restored)
    training.status("b", 1, loaded=False)
    again(training, 0, "a")
    number = training.run.decision.number

    training.report("a", "b")

    told = training.view("b").runs[0].decision
    assert training.decided() == ("CONFIRMED", (10, 1))
    assert told.number > number
    assert [0, 1] == [shard.id.rank for shard in told.shards]
    assert training.run.pins == (training.restored,)

    training.status("b", 1, loaded=True)
    training.report("b")

    assert training.run.pins == ()


def test_a_catalogue_that_has_just_come_lists_no_shards_yet(training):
    """4.8: a node that has not reported may have another copy of one."""
    training.forget()
    training.register(1, "b", nonce=b"second", generation=2, restored=training.restored)
    training.status("b", 1, loaded=False)
    before = training.run
    training.report("a", "b")

    def listed(listens_until_s):
        after = advance(before, training.nodes, training.now_s, training.limits, listens_until_s)
        return len(after.run.decision.shards)

    assert listed(training.now_s + 1.0) == 0
    assert listed(training.now_s) == 2


def test_what_was_restored_is_acknowledged_again(training):
    """P5, P6: else nothing older is let go, and without a slot nothing is saved any more."""
    training.forget()
    again(training, 0, "a")
    again(training, 1, "b")

    training.report("a", "b")

    assert training.levels() == {(10, 1): "replicated"}
    assert training.view("a").runs[0].free_before == training.restored


def test_what_was_restored_and_has_expired_since_gets_no_row_of_what_a_late_node_has(training):
    """M5: the row was deleted with the objects, and its notes with it."""
    training.commit(20, 2, "a", "b")
    rows = tuple(row for row in training.run.checkpoints if row.id != training.restored)
    training.run = replace(training.run, checkpoints=rows)

    training.report("a", "b")

    assert training.levels() == {(20, 2): "replicated"}


def test_of_what_is_not_whole_no_row_is_made_and_no_list(training):
    """P1: a rank would begin with the shards that happen to have been reported."""
    training.forget()
    for node in "ab":
        training.drop(node, 10, 1, 1)
    training.status("b", 1, loaded=False)
    again(training, 0, "a")
    training.register(1, "b", nonce=b"second")
    training.report("a", "b")

    assert training.levels() == {}
    assert training.run.decision.shards == ()


def test_of_what_only_a_lost_node_had_no_row_is_made(training):
    """4.4: a step is local where it lies on nodes that live."""
    training.forget()
    again(training, 0, "a")
    before = training.run
    training.report("a", "b")
    training.drop("a", 10, 1, 1)
    training.machines["b"].leaving = True
    for name in "ab":
        training.nodes[name] = replace(training.nodes[name], inventory=training.inventory(name))
    training.nodes["b"] = replace(training.nodes["b"], lease_until_s=0.0)

    after = advance(before, training.nodes, training.now_s, training.limits).run

    assert after.checkpoints == ()


def test_a_catalogue_that_has_just_come_acknowledges_nothing_yet(training):
    """P5: by the copies that the few nodes allow which have reported, others free what is older."""
    training.forget()
    again(training, 0, "a")
    before = training.run
    training.report("a", "b")

    def rows(listens_until_s):
        after = advance(before, training.nodes, training.now_s, training.limits, listens_until_s)
        return [row.id for row in after.run.checkpoints]

    assert rows(training.now_s + 1.0) == []
    assert rows(training.now_s) == [training.restored]


@pytest.fixture
def backup(training):
    """The catalogue is from before the restore was confirmed; step 11 has come back since."""
    undecided = replace(training.run.decision, state=DecisionState.PENDING, checkpoint=None)
    bare = [replace(rank, ready_decision=0, loaded=False) for rank in training.run.ranks]
    nonces = training.nonces
    undecided = replace(undecided, shards=())
    training.forget(
        replace(training.run, decision=undecided, ranks=tuple(bare), rules=(), moves=())
    )
    training.nonces = nonces
    for rank, owner in enumerate("ab"):
        training.hold("c", 11, 1, rank, owner=owner)
        training.status(owner, rank, nonce=b"second")
    training.report("c", "a", "b")
    return training


def test_for_ranks_that_have_loaded_nothing_else_is_chosen(backup):
    """P2: their mates would begin with another step, and the catalogue believe in it."""
    backup.later(20.0)
    backup.report("c", "a", "b")

    assert backup.decided() == ("PENDING", None)


def test_what_ranks_have_loaded_stands_in_a_catalogue_from_before_it_was_confirmed(backup):
    """4.0, P4: they train on, and what their restore had left behind is left behind."""
    number = backup.run.decision.number

    assert again(backup, 1, "b") == 2
    backup.report("a", "b")

    assert backup.decided() == ("CONFIRMED", (10, 1))
    assert backup.run.decision.number > number
    assert backup.run.superseded(replace(backup.restored, step=11))
    assert again(backup, 0, "a") == 2
    assert backup.kinds().count("attempt_readmitted") == 1


def test_what_was_tried_in_vain_before_does_not_count_for_what_a_rank_has_loaded(backup):
    """P5: its mates would never be told the shards."""
    backup.run = replace(backup.run, rejected=(backup.restored,))
    again(backup, 1, "b")

    assert backup.run.rejected == ()


def test_what_was_chosen_before_a_rank_said_what_it_has_loaded_is_held_no_more(backup, checkpoint):
    """4.8: it is not being restored."""
    other = checkpoint(11, 1)
    proposed = replace(backup.run.decision, state=DecisionState.PROPOSED, checkpoint=other)
    backup.status("b", 1, loaded=False)
    backup.report("b")
    ranks = tuple(replace(rank, loaded=rank.rank == 0) for rank in backup.run.ranks)
    backup.run = replace(backup.run, decision=proposed, pins=(other,), ranks=ranks)
    for node in "ab":
        backup.drop(node, 10, 1, 1)
        backup.report(node)

    again(backup, 0, "a")

    assert backup.decided() == ("CONFIRMED", (10, 1))
    assert other not in backup.run.pins


def test_what_ranks_that_train_have_saved_does_not_fence_them(backup):
    """P4: it is their own number, though the catalogue does not know that they began."""
    backup.commit(20, 2, "a", "b")
    assert backup.run.generation == 2

    again(backup, 0, "a")
    backup.report("a", "b")

    assert backup.levels()[20, 2] == "replicated"


@pytest.mark.parametrize(
    "ranks",
    [{"nonce": b"other"}, {"loaded": False}, {"generation": 1, "nonce": b"second", "loaded": True}],
)
def test_what_a_namesake_has_saved_fences_ranks_that_wait(backup, ranks):
    """P2: shards of both would be of one generation. Who trained as another is none of them."""
    for rank, node in enumerate("ab"):
        backup.status(node, rank, loaded=True)
        backup.status(node, rank, **ranks)
    backup.commit(20, 2, "a", "b")

    assert backup.run.generation == 3


def test_a_number_that_was_used_elsewhere_fences_ranks_that_wait_once(backup):
    """M1: the counter goes on from there, though the restore that it ended is undecided."""
    backup.commit(20, 5, "a", "b")
    backup.report("a", "b")

    assert backup.run.generation == 5


def test_who_has_not_begun_takes_no_attempt_in_again(backup):
    """S3: it knows of no restore."""
    assert again(backup, 0, "a", generation=0, restored=None) == 2
    assert backup.decided() == ("PENDING", None)


def test_of_two_attempts_that_live_the_higher_one_wins(training):
    """P2, M1: whoever comes first."""
    training.forget()
    again(training, 0, "a")
    assert again(training, 1, "b", nonce=b"newer", generation=5) == 5

    with pytest.raises(StaleGenerationError, match="attempt 5 is"):
        again(training, 0, "a", nonce=b"other", generation=4)
    with pytest.raises(StaleGenerationError, match="replaced by attempt 5"):
        again(training, 1, "b")


def test_a_number_that_another_attempt_has_is_not_taken(training):
    """P2: shards of both would be of one generation."""
    training.forget()
    assert training.register(0, "a", nonce=b"third", generation_min=1) == 2

    with pytest.raises(StaleGenerationError):
        again(training, 1, "b")


@pytest.mark.parametrize("state", [DecisionState.PENDING, DecisionState.CONFIRMED])
def test_who_trains_is_given_no_other_number(training, state):
    """M1: a mate that had not begun came first to an empty catalogue, and was numbered anew."""
    training.forget()
    assert training.register(1, "b", nonce=b"second", generation_min=2) == 3
    decision = replace(training.run.decision, state=state)
    training.run = replace(training.run, decision=decision)

    with pytest.raises(StaleGenerationError, match="attempt 2 was replaced by attempt 3"):
        again(training, 0, "a")


def test_a_catalogue_from_a_backup_goes_on_with_the_attempt_that_is_newer(training):
    """P6: the lease of an older attempt, which the backup still shows, is no hindrance."""
    training.forget()
    training.register(0, "a", nonce=b"first", launcher="elsewhere")

    assert again(training, 0, "a") == 2
    training.commit(20, 2, "a", "b")
    assert training.levels()[20, 2] == "replicated"


def test_a_start_that_it_has_made_is_not_made_again(training):
    """4.8: a launcher's restart of the script goes on from the newest checkpoint."""
    start = Start(name="step 10 L", step=10)
    training.forget()
    for rank, node in enumerate("ab"):
        again(training, rank, node, start=start)
    training.commit(20, 2, "a", "b")

    training.launch(b"third", "a", "b", start=start)

    assert training.decided() == ("PROPOSED", (20, 2))


def test_what_cannot_have_been_restored_is_refused(training, checkpoint):
    training.forget()

    for past in (checkpoint(30, 2), replace(checkpoint(10, 1), run="fedcba987654")):
        with pytest.raises(InvalidRequestError, match="cannot have restored"):
            again(training, 0, "a", restored=past)
