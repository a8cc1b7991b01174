"""F7, P1, P4: what the ranks of a job tell each other and their agents while DCP saves.

The calls of DCP are made here one by one, for ranks that stop anywhere between them.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast.errors import ConflictError, InvalidRequestError, PreconditionError
from holdfast.integrations.dcp import HoldfastJob, job_writer
from holdfast.integrations.dcp.job_writer import JobWriter
from holdfast.training.launch import RankPlace

WORLD = 2


@dataclass
class Job:
    """Notes what is asked of a job."""

    place: RankPlace
    job: str = "job"
    newest: int = 0
    saved: list = field(default_factory=list)
    held: list = field(default_factory=list)
    given_up: list = field(default_factory=list)
    given_up_at_close: list = field(default_factory=list)
    awaited: int = 0
    error: BaseException | None = None

    def begin(self):
        """Nothing is there to be loaded first."""

    def save(self, step, tensors, tree, *, held_bytes):
        if self.error is not None:
            raise self.error
        self.saved.append((step, [spec.fqn for spec, _ in tensors], dict(tree)))
        self.held.append(held_bytes)

    def give_up(self, step, error):
        self.given_up.append((step, str(error)))

    def close(self, timeout_s):
        self.given_up_at_close = list(self.given_up)

    def await_commit(self):
        self.awaited += 1


class Rank:
    """One rank; each method is a call of DCP, in their order."""

    def __init__(self, rank, world_size=WORLD, newest=0):
        self.is_first = rank == 0
        place = RankPlace(rank=rank, world_size=world_size, local_world_size=world_size)
        self.job = Job(place, newest=newest)
        self.writer = JobWriter(self.job)
        self.planner = DefaultSavePlanner()

    def begins(self, state, checkpoint_id=None, **how):
        if checkpoint_id is not None:
            self.writer.reset(checkpoint_id)
        self.writer.set_up_storage_writer(how.pop("is_first", self.is_first), **how)
        self.planner.set_up_planner(state, None, is_coordinator=self.is_first)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def writes(self, plan):
        return self.writer.write_data(self.planner.finish_plan(plan), self.planner).value()


@pytest.fixture(autouse=True)
def _words(monkeypatch):
    words = dist.HashStore()
    words.set_timeout(timedelta(milliseconds=1))
    monkeypatch.setattr(job_writer, "_store", lambda: words)


@pytest.fixture
def ranks():
    return [Rank(rank) for rank in range(WORLD)]


def own(rank):
    return {"n": 7, f"w{rank}": torch.full((2,), float(rank))}


def plans_of(ranks, ids=(None, None)):
    """Have all ranks plan a save; return each one's part, and what the first knows of all."""
    pairs = zip(ranks, ids, strict=True)
    plans = [rank.begins(own(n), checkpoint_id) for n, (rank, checkpoint_id) in enumerate(pairs)]
    plans, metadata = ranks[0].planner.create_global_plan(plans)
    return ranks[0].writer.prepare_global_plan(plans), metadata


def save(ranks, ids=(None, None)):
    plans, metadata = plans_of(ranks, ids)
    results = [rank.writes(plan) for rank, plan in zip(ranks, plans, strict=True)]
    ranks[0].writer.finish(metadata, results)


def steps(rank):
    return [step for step, _, _ in rank.job.saved]


def test_all_save_the_step_that_the_first_has_counted_and_it_has_the_text(ranks):
    save(ranks)
    save(ranks)

    assert [(1, ["w1"], {}), (2, ["w1"], {})] == ranks[1].job.saved
    assert [1, 2] == steps(ranks[0])
    _, names, tree = ranks[0].job.saved[0]
    assert ["w0"] == names
    assert {"n", "w0", "w1"} == tree.keys()
    assert [2, 0] == [rank.job.awaited for rank in ranks]
    assert [[], []] == [rank.job.given_up for rank in ranks]


@pytest.mark.parametrize("ids", [("x/5", None), ("x/5", "y/5")])
def test_the_id_of_the_first_rank_says_which_step_it_is(ranks, ids):
    """A script may name it on one rank alone, and is not to wait for who says nothing."""
    save(ranks)
    save(ranks, ids)
    save(ranks)

    assert [1, 5, 6] == steps(ranks[0]) == steps(ranks[1])


@pytest.mark.parametrize("ids", [(None, "x/5"), ("x/4", "x/5")])
def test_ranks_with_ids_that_differ_have_no_checkpoint(ranks, ids):
    with pytest.raises(ConflictError, match="different steps"):
        save(ranks, ids)

    assert [] == ranks[0].job.saved
    assert 1 == len(ranks[0].job.given_up)
    ranks[0].begins(own(0))
    assert 1 == len(ranks[0].job.given_up), "once is enough"


def test_what_another_rank_has_failed_is_given_up_when_the_next_save_begins(ranks):
    """By the one that would have written last; no other rank knows whether it is committed."""
    plans, _ = plans_of(ranks)
    for rank, plan in zip(ranks, plans, strict=True):
        rank.writes(plan)
    save(ranks)

    assert [(1, "another rank failed")] == ranks[0].job.given_up
    assert [] == ranks[1].job.given_up
    assert [2] == steps(ranks[0])


def test_a_save_that_was_only_planned_is_not_given_up(ranks):
    """Its step may be that of a checkpoint; and the number is not used up."""
    plans_of(ranks, ("5", "5"))
    save(ranks, ("5", "5"))

    assert [] == ranks[0].job.given_up
    assert [5] == steps(ranks[0])


@pytest.mark.parametrize(("checkpoint_id", "failed"), [(None, 1), ("x/5", 5)])
def test_a_count_goes_on_after_a_rank_that_came_further_than_the_first(
    ranks, checkpoint_id, failed
):
    """The first had failed between its plan and its part."""
    plans, _ = plans_of(ranks, (checkpoint_id,) * WORLD)
    ranks[1].writes(plans[1])
    with pytest.raises(PreconditionError, match="only grow"):
        save(ranks, ("x/1", "x/1") if failed > 1 else ("x/0", "x/0"))
    save(ranks)

    assert [failed + 1] == steps(ranks[0])


def test_a_job_goes_on_after_the_step_that_it_was_loaded_from():
    counted, named = ([Rank(rank, newest=7) for rank in range(WORLD)] for _ in range(2))
    with pytest.raises(PreconditionError, match="step 7 is not after step 7"):
        save(named, ("x/7", "x/7"))
    save(counted)

    assert [8] == steps(counted[0]) == steps(counted[1])


def test_what_another_rank_has_failed_is_given_up_at_the_end_of_the_job(ranks):
    """The others would wait for it till the last."""
    plans, _ = plans_of(ranks)
    ranks[0].writes(plans[0])
    job = HoldfastJob.__new__(HoldfastJob)
    job._job, job.writer = ranks[0].job, ranks[0].writer
    job.close()

    assert [(1, "another rank failed")] == ranks[0].job.given_up
    assert ranks[0].job.given_up == ranks[0].job.given_up_at_close


def test_what_was_interrupted_while_it_was_written_last_is_given_up(ranks):
    ranks[0].job.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        save(ranks)
    ranks[0].writer.give_up_unfinished()

    assert [(1, "another rank failed")] == ranks[0].job.given_up


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no data")])
def test_a_planner_that_fails_has_all_ranks_give_the_step_up(ranks, error):
    plans, _ = plans_of(ranks)

    def fails(item):
        raise error

    ranks[1].planner.resolve_data = fails
    with pytest.raises(type(error)):
        ranks[1].writes(plans[1])

    [(step, said)] = ranks[1].job.given_up
    assert (1, True) == (step, type(error).__name__ in said)
    with pytest.raises(PreconditionError, match="call it first"):
        ranks[1].writes(plans[1])


def test_a_rank_keeps_nothing_of_the_state_that_it_has_saved(ranks):
    """A stager writes the next copy there."""
    state = own(1)
    memory = weakref.ref(state["w1"].untyped_storage())
    ranks[0].begins(own(0))
    ranks[1].writes(ranks[1].begins(state))
    ranks[1].planner = None
    state.clear()
    gc.collect()

    assert memory() is None


def test_ranks_that_save_alone_each_write_the_whole_text(ranks):
    for number, rank in enumerate(ranks):
        plan = rank.begins(own(number), "x/3", use_collectives=False)
        [plan], metadata = rank.planner.create_global_plan([plan])
        [plan] = rank.writer.prepare_global_plan([plan])
        rank.writer.finish(metadata, [rank.writes(plan)])

        assert [(3, [f"w{number}"], {"n", f"w{number}"})] == [
            (step, names, tree.keys()) for step, names, tree in rank.job.saved
        ]


def test_ranks_that_do_not_save_together_are_told_what_to_do(ranks):
    with pytest.raises(InvalidRequestError, match="use_collectives=False: give the save a"):
        ranks[1].begins(own(1), "last", use_collectives=False)
    with pytest.raises(InvalidRequestError, match="leave out no_dist"):
        ranks[1].begins(own(1), is_first=True)
    plan = ranks[0].begins(own(0))
    with pytest.raises(InvalidRequestError, match="1 of the job's 2 ranks save"):
        ranks[0].writer.prepare_global_plan([plan])
    with pytest.raises(InvalidRequestError, match=r"key 'rank\.0' cannot be used"):
        ranks[0].begins({"rank": [torch.ones(1)]})
    with pytest.raises(PreconditionError, match="call it first"):
        Rank(0).writer.prepare_global_plan([plan])


def test_what_a_rank_has_of_the_state_stays_known_while_plans_are_kept():
    """A plan that is kept is empty when it is told of: so much is loaded in a restore."""
    rank = Rank(0, world_size=1)
    DefaultSavePlanner._cached_save_plan.clear()
    for _ in range(2):
        rank.planner = DefaultSavePlanner(enable_plan_caching=True)
        plan = rank.begins({"w": torch.ones(3)})
        [plan], metadata = rank.planner.create_global_plan([plan])
        rank.writer.finish(metadata, [rank.writes(plan)])

    assert [12, 12] == rank.job.held
