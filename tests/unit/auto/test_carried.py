"""What a training loop carries from batch to batch is found in its source."""

from __future__ import annotations

import ast

import pytest

from holdfast.auto.carried import carried


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("step += 1", {"step"}),
        ("step = step + 1", {"step"}),
        ("loss = model(x)\nprint(loss)", set()),
        ("out, hidden = model(x, hidden)", {"hidden"}),
        ("best = max(best, loss)", {"best"}),
        ("if best < loss:\n    best = loss", {"best"}),
        ("losses.append(1)", set()),
        ("for i in range(2):\n    total = total + i", {"total"}),
        ("for a in b:\n    i = a\n    use(i)", set()),
        ("def closure():\n    return step\nstep = 1", set()),
        ("y = [step for step in x]\nstep = 1", set()),
        ("n: int = n + 1", {"n"}),
        ("use(n := n + 1)", {"n"}),
        ("table[step] = 1\nstep = 2", {"step"}),
        ("x = x * 2", set()),
        ("with torch.no_grad():\n    mean = mean * 0.9", {"mean"}),
    ],
)
def test_names_that_are_read_before_they_are_set(body, names):
    text = "for x in loader:\n" + "\n".join(f"    {line}" for line in body.splitlines())
    [loop] = ast.parse(text).body
    assert carried(loop) == names


def test_a_while_loop_carries_too():
    [loop] = ast.parse("while step < 5:\n    step += 1").body
    assert carried(loop) == {"step"}
