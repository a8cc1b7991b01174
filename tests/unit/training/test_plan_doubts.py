"""Rank 0 looks at steps whose ranks do not add up, names the tensor once, and doubts no others."""

import pytest

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.core.needs import Head
from holdfast.core.session import SessionView, StepLevels
from holdfast.core.shard import PRIME, UNLIKE
from holdfast.errors import UnavailableError
from holdfast.format.boxes import Box, whole
from holdfast.format.segment import SegmentIdentity, TensorSpec, header_template
from holdfast.format.tally import encode, tally
from holdfast.training.plan_doubts import PlanDoubts

SHAPE = (4, 3)
GIVEN_UP = f"{UNLIKE}: the boxes of some tensor leave a hole, or overlap"


class Ranks:
    """Two ranks that save rows of ``w``, and what rank 0 says of them."""

    def __init__(self):
        self.heads = {}
        self.asked = []
        self.told = []
        self.error = None
        self.doubts = PlanDoubts("j", 2, self.find, self.told.append, lambda look: look())

    def find(self, checkpoint, ranks):
        self.asked.append((checkpoint.step, frozenset(ranks)))
        if self.error is not None:
            raise self.error
        if not ranks <= self.heads.keys():
            self.save(checkpoint.step + 1)  # training does not wait for what is missing
        return [self.heads[rank] for rank in sorted(ranks) if rank in self.heads]

    def plan(self, *spans, answers=True, fqn="w"):
        """Have each rank save rows of ``fqn``, from one up to another; None: it is not there."""
        self.heads = {
            rank: head(rank, fqn, span, whole(SHAPE) if answers and not rank else None)
            for rank, span in enumerate(spans)
            if span is not None
        }

    def give_up(self, step, reason=GIVEN_UP):
        self.doubts.hear(view(step, reason))

    def save(self, step):
        """Begin a step; the doubts look at it at once."""
        self.doubts.begun(step, "r1", 1)


def head(rank, fqn, span, answer):
    box = Box((span[0], 0), (span[1] - span[0], SHAPE[1]))
    total = tally(fqn, "F32", SHAPE, box)
    if answer is not None:
        total -= tally(fqn, "F32", SHAPE, answer)
    identity = SegmentIdentity(
        id=ShardId(RunId("r1"), Step(0), Generation(1), Rank(rank)),
        job="j",
        world_size=2,
        plan_hash=f"own{span}-{encode(total % PRIME)}.all",
    )
    spec = TensorSpec(fqn=fqn, dtype="F32", shape=SHAPE, box=box)
    template = header_template(identity, [spec])
    data = template.fill(step=1, generation=1, parent=None)
    return Head(rank=rank, length_bytes=template.length_bytes, data=data)


def view(step, reason):
    levels = StepLevels(step=step, abandoned=True, reason=reason)
    return SessionView(version=1, steps=(levels,))


@pytest.fixture
def ranks():
    return Ranks()


def test_nothing_is_asked_for_while_no_step_was_given_up_for_its_plan(ranks):
    ranks.plan((0, 2), (3, 4))
    ranks.give_up(1, "rank 1 went on without saving it")
    ranks.save(2)

    assert ranks.asked == []


def test_a_hole_is_told_once_with_its_tensor(ranks):
    ranks.plan((0, 2), (3, 4))
    ranks.give_up(1)
    for step in (2, 3):
        ranks.save(step)
        ranks.give_up(step)

    (event,) = ranks.told
    assert (event.kind, event.severity, event.job) == ("plan_refused", "error", "j")
    assert "no rank saves [2, 0] + [1, 3] of tensor 'w' [4, 3]" in event.message
    assert event.context == {"step": "2"}


def test_a_fault_after_one_that_has_passed_is_told_too(ranks):
    """Ranks made their optimizers' state at different steps once; later one lacks a layer."""
    ranks.plan((0, 2), (2, 4))
    ranks.give_up(1)
    ranks.save(2)
    asked = len(ranks.asked)
    ranks.save(3)
    assert len(ranks.asked) == asked, "no step was given up since"
    ranks.give_up(1)
    ranks.save(4)
    assert len(ranks.asked) == asked, "nor by hearing of the same one again"

    ranks.plan((0, 2), (3, 4))
    ranks.give_up(4)
    ranks.save(5)

    assert ["[2, 0] + [1, 3]" in event.message for event in ranks.told] == [True]


def test_heads_of_different_plans_are_not_compared(ranks):
    """Rank 0 has planned anew between two looks: rank 1 is not what its old boxes leave open."""
    ranks.plan((0, 2), None)
    ranks.give_up(1)
    ranks.save(2)
    ranks.plan((0, 3), (3, 4))
    ranks.save(4)

    assert ranks.told == []


def test_what_no_rank_has_is_not_looked_for_again(ranks):
    """No box of it is in any header, so each look would see as little."""
    ranks.plan((0, 4), (4, 4), answers=False)
    ranks.give_up(1)
    ranks.save(2)
    asked = len(ranks.asked)
    ranks.give_up(2)
    ranks.save(3)

    assert ranks.told == []
    assert len(ranks.asked) == asked


def test_an_agent_that_does_not_answer_is_asked_at_the_next_step(ranks):
    ranks.plan((0, 2), (3, 4))
    ranks.error = UnavailableError("away")
    ranks.give_up(1)
    ranks.save(2)
    assert ranks.told == []

    ranks.error = None
    ranks.save(3)

    assert len(ranks.told) == 1
