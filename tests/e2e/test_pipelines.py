"""Stages of a pipeline come back on another number of stages, and bit for bit.

Issue 10, items 1, 2 and 5. Real processes, a real stack.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.stack import Stack, running_stack, until
from tests.e2e.test_bit_identity import told
from tests.e2e.test_docs import newest_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
STAGES = Path(__file__).with_name("stage_trainer.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


def launch(stack: Stack, script: Path, world_size: int, *more: str):
    return stack.ranks(*more, world_size=world_size, nodes=(0, 1), script=script)


def losses(outputs: list[str]) -> dict[int, str]:
    found = re.findall(r"^step (\d+): loss (\S+)$", "\n".join(outputs), re.MULTILINE)
    return {int(step): loss for step, loss in found}


def reaches(stack: Stack, job: str, step: int) -> bool:
    return newest_step(stack, job) >= step


def test_the_example_is_killed_and_goes_on_with_other_stages_to_the_same_loss(stack):
    """By hand on four, traced on two, then in one process; one process alone has the same bits."""
    calm = losses(launch(stack, EXAMPLE, 1, "--job", "calm", "--steps", "60").succeed())
    ranks = launch(stack, EXAMPLE, 4)
    until(partial(reaches, stack, "pipeline", 20), "step 20 to be safe")
    ranks.trainers[2].process.kill()
    ranks.wait()
    safe = newest_step(stack, "pipeline")

    for world_size, more in ((2, ("--traced",)), (1, ())):
        steps = safe + 20
        outputs = launch(stack, EXAMPLE, world_size, *more, "--steps", str(steps)).succeed()
        begun = {int(told("begins at step", text)) for text in outputs}
        assert begun == {safe}
        found = losses(outputs)
        assert found.keys() == {safe + 10, safe + 20}
        assert all(calm.get(step, loss) == loss for step, loss in found.items())
        safe = steps


ROUTES = [
    ["ddp 2 2", "plain 4 1", "fsdp 2 2", "plain 1 1", "fsdp 1 2", "ddp 2 2", "plain 2 1"],
    ["grid 2 4", "grid 2 2", "fsdp 2 2", "grid 1 4", "plain 1 1", "grid 2 4"],
]


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_a_pipeline_goes_on_over_every_kind_of_stage(stack, route):
    """Each begins with the very bits, of model and optimizer, that the last one left.

    By kind, stages and ranks of each; a grid is of stages, FSDP2 and tensor parallelism.
    """
    before, steps = None, 0
    for kind, stages, copies in map(str.split, route):
        steps += 2
        outputs = launch(
            stack, STAGES, int(stages) * int(copies), "--kind", kind, "--stages", stages,
            "--steps", str(steps), "--job", f"stages-{ROUTES.index(route)}",
        ).succeed()  # fmt: skip

        # On as many ranks it hears only then that they are other groups.
        assert not any("fetching the others" in text for text in outputs), (kind, stages)
        loaded = {told("loaded", text) for text in outputs}
        assert before is None or loaded == {f"{steps - 2} {before}"}, (kind, stages)
        [before] = {told("final", text) for text in outputs}
