"""Who this process is: place, nonce, launcher."""

import pytest
from tests.unit.state import worlds

import holdfast
from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.training import launch as attempt


def test_a_process_without_torchrun_is_the_only_rank():
    assert attempt.place({}) == attempt.RankPlace(rank=0, world_size=1, local_world_size=1)


def test_torchruns_variables_give_the_place_and_the_nodes():
    where = attempt.place({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})

    assert (where.rank, where.world_size, where.nodes_count) == (3, 8, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
        {"RANK": "zero", "WORLD_SIZE": "2"},
    ],
)
def test_a_contradictory_place_is_refused(environ):
    with pytest.raises(InvalidRequestError, match="WORLD_SIZE"):
        attempt.place(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "0 of 1"),  # as torch.multiprocessing.spawn starts them
        ({"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "1 of 8"),
        ({"RANK": "2", "WORLD_SIZE": "4"}, "2 of 4"),
    ],
)
def test_a_process_group_that_counts_ranks_otherwise_is_refused(monkeypatch, environ, said):
    """Defect: each of four processes was the only rank of a job of its own, of one name."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with worlds.becoming() as become:
        become(1, 4)
        with pytest.raises(InvalidRequestError, match=f"rank 1 of 4, but RANK .* say {said}"):
            holdfast.Checkpointer("job", {})


def test_ranks_without_a_process_group_cannot_agree_on_a_nonce():
    """Architecture 4.0: with several ranks and no name for the launch, restore() refuses."""
    where = attempt.RankPlace(rank=0, world_size=2, local_world_size=2)

    with pytest.raises(PreconditionError, match="init_process_group"):
        attempt.nonce({}, where)


def test_a_named_attempt_has_one_nonce_on_every_rank():
    places = [attempt.RankPlace(rank=r, world_size=2, local_world_size=1) for r in (0, 1)]
    nonces = {attempt.nonce({"HOLDFAST_ATTEMPT": "launch-17"}, where) for where in places}

    assert len(nonces) == 1
    assert len(nonces.pop()) == attempt.NONCE_BYTES


def test_a_lone_process_is_a_new_attempt_each_time():
    where = attempt.RankPlace(rank=0, world_size=1, local_world_size=1)

    assert attempt.nonce({}, where) != attempt.nonce({}, where)


def test_torchruns_default_run_id_names_no_launch():
    """Two launches with the default id are two launchers; a restart by one torchrun is the same."""
    first = attempt.launcher({"TORCHELASTIC_RUN_ID": "none"})

    assert first.startswith("parent:")
    assert first == attempt.launcher({"TORCHELASTIC_RUN_ID": "none"})
    assert attempt.launcher({"TORCHELASTIC_RUN_ID": "abc"}) == "torchrun:abc"
    assert attempt.launcher({"HOLDFAST_LAUNCH": "x", "TORCHELASTIC_RUN_ID": "abc"}) == "launch:x"


def test_the_first_job_of_every_ray_cluster_is_not_one_launcher():
    """Defect X11: Ray numbers its jobs from 01000000 in each cluster; a second trainer is one."""
    driver = {"RAY_JOB_ID": "01000000"}

    assert attempt.launcher(driver) == f"process:{attempt.holder()}"


ALONE = attempt.RankPlace(rank=0, world_size=1, local_world_size=1)
PAIR = attempt.RankPlace(rank=0, world_size=2, local_world_size=2)
SPREAD = attempt.RankPlace(rank=0, world_size=2, local_world_size=1)


@pytest.mark.parametrize(
    ("environ", "where", "wish", "name"),
    [
        ({"HOLDFAST_LAUNCH": "x"}, SPREAD, {"fresh": True}, "fresh launch:x"),
        ({"TORCHELASTIC_RUN_ID": "r"}, SPREAD, {"step": 30}, "step 30 torchrun:r"),
        ({}, SPREAD, {"fresh": "november"}, "fresh named:november"),
    ],
)
def test_a_start_is_named_by_its_launch_or_by_the_user(environ, where, wish, name):
    """ADR 0023: the name stays the same when the launcher starts the script again."""
    start = attempt.start(environ, where, **{"fresh": False, "step": None, **wish})

    assert (name, "fresh" in wish) == (start.name, start.fresh)
    assert wish.get("step", 0) == start.step


def test_without_a_wish_there_is_no_start():
    assert attempt.start({}, SPREAD, fresh=False, step=None) is None


def test_step_0_is_a_step():
    assert attempt.start({}, ALONE, fresh=False, step=0).step == 0


@pytest.mark.parametrize(
    ("environ", "where"), [({}, PAIR), ({"TORCHELASTIC_RUN_ID": "none"}, SPREAD)]
)
@pytest.mark.parametrize("wish", [{"fresh": True, "step": None}, {"fresh": False, "step": 3}])
def test_a_launch_without_a_name_that_all_ranks_share_cannot_start_elsewhere(environ, where, wish):
    """Else a restart would be taken for another launch, and throw away what was trained."""
    with pytest.raises(PreconditionError, match="HOLDFAST_LAUNCH"):
        attempt.start(environ, where, **wish)


def test_one_torchrun_on_one_machine_is_name_enough():
    assert attempt.start({"TORCHELASTIC_RUN_ID": "none"}, PAIR, fresh=True, step=None)


@pytest.mark.parametrize("step", [-1, "5", True, 1.0])
def test_what_is_no_step_is_not_gone_back_to(step):
    with pytest.raises(InvalidRequestError, match="number of optimizer steps"):
        attempt.start({}, ALONE, fresh=False, step=step)


def test_starting_over_and_going_back_exclude_each_other():
    with pytest.raises(InvalidRequestError, match="contradict each other: pass only one"):
        attempt.start({}, ALONE, fresh=True, step=3)
