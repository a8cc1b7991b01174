"""One generation per launch, one trainer per name."""

import pytest
from tests.said import registration

from holdfast.errors import AlreadyExistsError, InvalidRequestError, StaleGenerationError
from holdfast_services.metadata.domain.attempts import check


def test_one_nonce_has_one_generation_from_whatever_rank_and_node(cluster):
    """F93, G12: many ranks, many nodes, repeats."""
    cluster.join("a", "b")
    seen = {cluster.register(rank, "ab"[rank % 2], world=8) for _ in range(2) for rank in range(8)}

    assert seen == {1}
    assert [rank.rank for rank in cluster.run.ranks] == list(range(8))


def test_a_second_launch_is_refused_while_the_first_lives(cluster):
    """G12: the refusal names the holder."""
    cluster.join("a")
    cluster.register(0, "a", world=1)

    with pytest.raises(AlreadyExistsError, match="holder of L") as refusal:
        cluster.register(0, "a", world=1, nonce=b"other", launcher="M")

    assert refusal.value.context["holder"] == "holder of L"


def test_the_same_launcher_takes_over_at_once(cluster):
    cluster.join("a")
    first = cluster.register(0, "a", world=1)
    second = cluster.register(0, "a", world=1, nonce=b"second")

    assert second > first


def test_takeover_and_an_ended_lease_let_another_launcher_in(cluster):
    cluster.join("a")
    cluster.register(0, "a", world=1)
    assert cluster.register(0, "a", world=1, nonce=b"2", launcher="M", takeover=True) == 2
    cluster.later(5.1)

    assert cluster.register(0, "a", world=1, nonce=b"3", launcher="N") == 3


def test_reports_of_live_ranks_renew_the_lease(cluster):
    cluster.join("a")
    cluster.register(0, "a", world=1)
    for _ in range(4):
        cluster.later(3.0)
        cluster.report("a")

    with pytest.raises(AlreadyExistsError):
        cluster.register(0, "a", world=1, nonce=b"2", launcher="M")


def test_the_lease_ends_at_once_when_every_rank_is_reported_gone(cluster):
    cluster.join("a", "b")
    cluster.register(0, "a")
    cluster.register(1, "b")
    cluster.status("a", 0, live=False)
    cluster.report("a")
    with pytest.raises(AlreadyExistsError):
        cluster.register(0, "a", nonce=b"2", launcher="M")

    cluster.status("b", 1, live=False)
    cluster.report("b")

    assert cluster.register(0, "a", nonce=b"2", launcher="M") == 2


@pytest.mark.parametrize(("nonce", "counts"), [(b"", True), (b"first", True), (b"other", False)])
def test_what_is_said_of_a_namesake_attempt_counts_for_nothing(cluster, nonce, counts):
    """P2: a lost catalogue had given the number too, and the agent still tells of its rank."""
    cluster.join("a")
    cluster.register(0, "a", world=1)

    cluster.status("a", 0, live=False, nonce=nonce)
    cluster.report("a")

    assert cluster.run.ranks[0].live is not counts


def test_the_view_of_a_run_names_its_attempt(cluster):
    """P2: two catalogues may give one number twice, never a nonce."""
    cluster.join("a")
    cluster.register(0, "a", world=1, nonce=b"mine")

    assert ["mine"] == [run.nonce.decode() for run in cluster.view("a").runs]


def test_a_replaced_attempt_is_told_so(cluster):
    """P2."""
    cluster.join("a")
    cluster.register(0, "a", world=1)
    cluster.register(0, "a", world=1, nonce=b"second")

    with pytest.raises(StaleGenerationError, match="replaced by attempt 2"):
        cluster.register(0, "a", world=1)


def test_ranks_of_one_attempt_agree_on_the_world_size(cluster):
    cluster.join("a")
    cluster.register(0, "a", world=2)

    with pytest.raises(InvalidRequestError, match="WORLD_SIZE=3"):
        cluster.register(1, "a", world=3)


def test_evidence_of_a_higher_generation_fences_the_attempt_of_a_lost_catalogue(cluster):
    """P6: the counter restarts above every generation that is seen."""
    cluster.join("a")
    assert cluster.register(0, "a", world=1) == 1
    cluster.hold("a", 50, 7, 0, world=1)
    cluster.report("a")

    assert cluster.run.current is None
    assert cluster.view("a").runs[0].generation == 7
    assert cluster.register(0, "a", world=1, nonce=b"second") == 8
    cluster.report("a")
    assert cluster.decided() == ("PROPOSED", (50, 7))


def test_evidence_of_the_attempts_own_generation_is_not_its_work_before_it_is_decided(cluster):
    """M1, P6, 4.8; defect A1: the catalogue was lost, the new attempt registers first.

    It may neither be told to start over nor commit what the old attempt of that number saved.
    """
    cluster.join("c")
    assert cluster.register(0, "c") == 1
    for rank in (0, 1):
        cluster.hold("a", 5000, 1, rank)
    cluster.report("c", "a")

    assert cluster.run.current is None
    assert cluster.decided() == ("PENDING", None)
    assert cluster.levels() == {}
    second = cluster.launch(b"second", "a", "c")
    assert second > cluster.view("a").runs[0].generation - 1 > 1
    assert cluster.decided() == ("PROPOSED", (5000, 1))


def test_an_attempt_that_was_proposed_to_is_fenced_by_its_own_generation_too(cluster):
    """M1; defect A1: a node of the lost catalogue's newest attempt reports last of all."""
    cluster.join("a", "b")
    cluster.hold("a", 10, 3, 0, world=1)
    cluster.report("a")
    assert cluster.register(0, "a", world=1) == 4
    cluster.report("a", "b")
    assert cluster.decided() == ("PROPOSED", (10, 3))

    cluster.hold("b", 20, 4, 0, world=1)
    cluster.report("b")

    assert cluster.run.current is None
    cluster.launch(b"second", "a")
    assert cluster.decided() == ("PROPOSED", (20, 4))


def test_a_registration_brings_the_generation_that_its_node_knows_of(cluster):
    """P6, M1; defect A1: the catalogue was lost, its ranks register before anybody reports."""
    cluster.join("b")
    cluster.machine("a")
    for rank in (0, 1):
        cluster.hold("a", 5000, 1, rank)

    first = cluster.register(0, "a", generation_min=1)
    assert (first, cluster.register(1, "b")) == (2, 2)
    cluster.report("a", "b")

    assert cluster.run.current
    assert cluster.decided() == ("PROPOSED", (5000, 1))


@pytest.mark.parametrize("number", [-1, 10**10])
def test_a_generation_that_no_attempt_can_have_is_refused(number):
    wish = registration(
        job="j", nonce=b"n", launcher="", holder="", takeover=False, rank=0, world_size=1,
        node="a", generation_min=number,
    )  # fmt: skip

    with pytest.raises(InvalidRequestError, match="attempt"):
        check(wish)
