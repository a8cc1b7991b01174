"""``core.node_view``: which checkpoints a confirmed restore makes void."""

import pytest

from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import SupersedeRule


@pytest.mark.parametrize(
    ("step", "generation", "expected"),
    [(6, 1, True), (5, 1, False), (6, 2, False), (99, 3, False), (4, 0, False)],
)
def test_a_later_step_of_an_older_generation_is_superseded(step, generation, expected):
    """Architecture, section 4.8."""
    rule = SupersedeRule(after_step=5, below_generation=2)

    assert expected is rule.covers(CheckpointId("r", step, generation))
