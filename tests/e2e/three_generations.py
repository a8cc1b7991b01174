"""What two launches of two ranks must have in common: generations 1, 2, 3, and no bit is lost."""

from __future__ import annotations

from typing import Any

from tests.e2e.stack import Stack
from tests.e2e.test_bit_identity import finals


def check_three_generations(
    stack: Stack, launch: Any, *, least: tuple[int, int], steps: str
) -> None:
    """Check a launch of which a rank was killed, then node 1 with its memory.

    ``least``: the steps from which the second and third attempts must have gone on at least.
    """
    restored = [launch.said(node, r"^restored (\d+) (.*)$") for node in (0, 1)]
    assert [len(of_node) for of_node in restored] == [3, 3]
    assert [int(step) for step, _ in restored[0]] == [int(step) for step, _ in restored[1]]
    first, second, third = [int(step) for step, _ in restored[0]]
    assert first == 0
    assert second >= least[0]
    assert third >= least[1]
    assert "'peer'" in restored[1][2][1], "the new one has nothing of its own"
    ends = [end for node in (0, 1) for end in launch.said(node, r"^final (\w+)$")]
    assert sorted(ends) == sorted(finals(stack, steps=steps, world_size=2))
    assert stack.rest(f"jobs/{launch.job}")["generation"] == 3
