"""Ranks that do not fit together are told so, by rank and tensor, and nothing of theirs commits.

Issue 10, bad input; F38. Real processes, a real stack.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.stack import Stack, running_stack, until
from tests.e2e.test_docs import newest_step

RANK = Path(__file__).with_name("bad_plan_trainer.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


def launch(stack: Stack, case: str):
    return stack.ranks("--case", case, world_size=2, nodes=(0, 1), script=RANK)


def test_a_rank_with_less_of_a_mesh_is_named_with_tensor_and_box(stack):
    """Rank 1 leaves its optimizer out: half of each moment would be nobody's."""
    first, _ = launch(stack, "less").succeed()

    assert "what the ranks save is not all of the state" in first
    assert "no rank saves [2, 0] + [2, 3] of tensor 'optimizer.state.model.weight.exp_avg'" in first
    assert newest_step(stack, "less") == 0
    told = until(lambda: events(stack, "plan_refused"), "the event")
    assert "no rank saves [2, 0] + [2, 3]" in told[0]["message"]


def test_a_rank_that_saves_another_step_commits_nothing_and_the_next_common_step_does(stack):
    """Rank 1 is a step ahead once; both steps are given up, by name, and the next one is whole."""
    outputs = launch(stack, "step").succeed()

    assert newest_step(stack, "step") == 4
    assert ["step 2", "step 3"] == [text[: len("step 2")] for text in outputs]
    assert all("went on without saving it" in text for text in outputs)


def test_two_models_of_one_job_over_other_meshes_come_back_each_by_its_role(stack):
    """An actor sharded over both ranks, a critic that each rank has by itself."""
    before = [text.splitlines()[-1] for text in launch(stack, "roles").succeed()]
    after = [text.splitlines()[0] for text in launch(stack, "roles").succeed()]

    assert before == ["holds 3 5", "holds 3 5"] == after


def events(stack: Stack, kind: str) -> list[dict]:
    return [one for one in stack.rest("events") if one["kind"] == kind]
