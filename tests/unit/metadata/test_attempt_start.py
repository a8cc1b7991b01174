"""Starting over and going back: asked by the script, made once per name."""

from dataclasses import replace

import pytest

from holdfast.core.decision import Start
from holdfast.errors import InvalidRequestError
from holdfast_services.metadata.domain.attempt_start import check

FRESH = Start(name="fresh launch:L", fresh=True)
BACK = Start(name="step 10 launch:L", step=10)
NODES = ("a", "b")


def trained(cluster, *steps):
    """A first attempt that has replicated these steps, one after the other, all still held."""
    cluster.join(*NODES)
    generation = cluster.launch(b"first", *NODES)
    for step in steps:
        cluster.commit(step, generation, *NODES)
    return generation


def begin(cluster, nonce, start, *, confirm=True):
    """Another attempt that asks for ``start``; its ranks fetch what is proposed."""
    generation = cluster.launch(nonce, *NODES, start=start)
    if confirm and cluster.run.decision.state.name == "PROPOSED":
        cluster.ready(("a", 0), ("b", 1))
    return generation


def test_a_fresh_start_leaves_all_checkpoints_behind(cluster):
    """F20, ADR 0013: confirmed at step 0; nothing older is chosen again, whoever asks."""
    trained(cluster, 0, 10, 20)

    second = begin(cluster, b"second", FRESH)

    assert ("CONFIRMED", None) == cluster.decided()
    assert cluster.run.decision.fresh
    assert not cluster.run.removed
    assert "steps up to 20" in cluster.run.decision.reason
    assert all(cluster.run.superseded(row.id) for row in cluster.run.checkpoints)
    begin(cluster, b"third", None)
    assert cluster.run.decision.fresh
    assert second < cluster.run.generation


def test_a_launch_that_is_started_again_keeps_what_it_has_trained(cluster):
    """The trap of fresh=True: torchrun runs the same script again after a crash."""
    trained(cluster, 10, 20)
    second = begin(cluster, b"second", FRESH)
    cluster.commit(5, second, *NODES)

    third = begin(cluster, b"third", FRESH)

    assert ("CONFIRMED", (5, second)) == cluster.decided()
    assert "start_repeated" in cluster.kinds()
    cluster.commit(7, third, *NODES)
    begin(cluster, b"fourth", FRESH)
    assert ("CONFIRMED", (7, third)) == cluster.decided()


def test_a_crash_before_the_start_was_made_does_not_use_it_up(cluster):
    """A launch that died before it was decided still starts over when it comes again."""
    trained(cluster, 10, 20)
    cluster.register(0, "a", nonce=b"second", start=FRESH)
    assert "PENDING" == cluster.run.decision.state.name

    begin(cluster, b"third", FRESH)

    assert cluster.run.decision.fresh


def test_another_launch_starts_over_again(cluster):
    """A resubmission is a new launcher: what it says is new."""
    trained(cluster, 10)
    second = begin(cluster, b"second", FRESH)
    cluster.commit(5, second, *NODES)

    begin(cluster, b"third", replace(FRESH, name="fresh launch:M"))

    assert cluster.run.decision.fresh
    assert all(cluster.run.superseded(row.id) for row in cluster.run.checkpoints)


def test_a_start_waits_for_every_rank(cluster):
    """Nothing is left behind that not all ranks have asked to leave, however long it takes."""
    trained(cluster, 10)
    cluster.register(0, "a", nonce=b"second", start=FRESH)
    cluster.report("a", "b")

    cluster.later(4.0)
    cluster.report("a", "b")
    cluster.later(4.0)
    cluster.report("a", "b")
    cluster.later(4.0)

    assert ("PENDING", None) == cluster.decided()


@pytest.mark.parametrize("other", [None, BACK, replace(FRESH, name="else")])
def test_ranks_that_ask_for_different_starts_are_refused(cluster, other):
    """All ranks must say the same."""
    trained(cluster, 10)
    cluster.register(0, "a", nonce=b"second", start=FRESH)

    with pytest.raises(InvalidRequestError, match="pass the same fresh= and step= on all ranks"):
        cluster.register(1, "b", nonce=b"second", start=other)


def test_an_older_step_is_restored_and_what_is_newer_left_behind(cluster):
    """F20: as in any confirmed restore; the next attempt of the launch takes the newest."""
    first = trained(cluster, 10, 20, 30)

    second = begin(cluster, b"second", BACK)

    assert ("CONFIRMED", (10, first)) == cluster.decided()
    assert [30, 20] == [r.id.step for r in cluster.run.checkpoints if cluster.run.superseded(r.id)]
    cluster.commit(15, second, *NODES)
    begin(cluster, b"third", BACK)
    assert ("CONFIRMED", (15, second)) == cluster.decided()


def test_an_older_step_comes_from_the_object_store(cluster):
    """Memory has only the newest steps; the object tier keeps older ones."""
    first = trained(cluster, 10, 20)
    cluster.object_tier()
    cluster.change(10, first, durable_at_s=cluster.now_s)
    cluster.put_object(10, first)
    for node in NODES:
        for rank in range(2):
            cluster.drop(node, 10, first, rank)
    cluster.report(*NODES)

    begin(cluster, b"second", BACK)

    assert ("CONFIRMED", (10, first)) == cluster.decided()


def test_a_step_that_cannot_be_restored_is_refused_with_those_that_can(cluster):
    """Never a fresh start, never another step; nothing is left behind."""
    first = trained(cluster, 20, 30)

    begin(cluster, b"second", BACK)
    assert "PENDING" == cluster.run.decision.state.name, "a node may still bring it"
    for _ in range(4):
        cluster.later(3.0)
        cluster.report(*NODES)

    assert ("LOST", None) == cluster.decided()
    assert cluster.run.decision.refused
    assert "steps that can: 30, 20" in cluster.run.decision.reason
    assert "restore_refused" in cluster.kinds()
    begin(cluster, b"third", None)
    assert ("CONFIRMED", (30, first)) == cluster.decided()


def test_a_step_of_which_a_shard_is_gone_names_the_shard(cluster):
    first = trained(cluster, 10, 30)
    for node in NODES:
        cluster.drop(node, 10, first, 1)
    cluster.report(*NODES)

    begin(cluster, b"second", BACK)
    for _ in range(4):
        cluster.later(3.0)
        cluster.report(*NODES)

    assert "lacks the shards of ranks 1" in cluster.run.decision.reason
    assert "steps that can: 30" in cluster.run.decision.reason


def test_a_step_that_was_left_behind_is_not_taken_back(cluster):
    """M2: a lineage that a confirmed restore has left stays left."""
    trained(cluster, 10, 30)
    begin(cluster, b"second", BACK)
    wish = Start(name="step 30 launch:L", step=30)

    begin(cluster, b"third", wish)
    for _ in range(4):
        cluster.later(3.0)
        cluster.report(*NODES)

    assert "left it behind" in cluster.run.decision.reason
    assert "steps that can: 10" in cluster.run.decision.reason


@pytest.mark.parametrize("start", [Start(name=""), Start(name="x" * 301), Start(name="x", step=-1)])
def test_a_start_that_cannot_be_kept_is_refused(start):
    with pytest.raises(InvalidRequestError, match="not possible"):
        check(start, "job")
