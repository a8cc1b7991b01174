"""What a training loop carries from batch to batch is found in its source."""

from __future__ import annotations

import ast

import pytest

from holdfast.auto.carried import carried
from holdfast.auto.flow import functions_of

FUNCTIONS = """
def tick():
    global ticks
    ticks += 1
    own = 1
    own += 1
def again(x):
    own = x
    again(own)
class Meter:
    def note(self, x):
        self.sum += x
        self.last = x
"""


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("step += 1", {"step"}),
        ("step = step + 1", {"step"}),
        ("loss = model(x)\nprint(loss)", set()),
        ("out, hidden = model(x, hidden)", {"hidden"}),
        ("best = max(best, loss)", {"best"}),
        ("if best < loss:\n    best = loss", {"best"}),
        ("losses.append(1)", {"losses"}),
        ("for i in range(2):\n    total = total + i", {"total"}),
        ("for a in b:\n    i = a\n    use(i)", set()),
        ("def closure():\n    return step\nstep = 1", set()),
        ("y = [step for step in x]\nstep = 1", set()),
        ("n: int = n + 1", {"n"}),
        ("use(n := n + 1)", {"n"}),
        ("table[step] = 1\nstep = 2", {"step", "table"}),
        ("x = x * 2", set()),
        ("self.step += 1", {"self.step"}),
        ("ema[k].mul_(0.9)", {"ema"}),
        ("for k in names:\n    k.mul_(0.9)", set()),
        ("if better:\n    kept = x", {"kept"}),
        ("if better:\n    x = 1\nelse:\n    x = 2\nuse(x)", set()),
        ("if bad:\n    continue\nkept = x", set()),
        ("try:\n    kept = x\nexcept ValueError:\n    kept = 0", set()),
        ("try:\n    kept = x\nexcept ValueError:\n    pass", {"kept"}),
        ("for y in x:\n    kept = y\nuse(kept)", set()),
        ("while go():\n    kept = 1", set()),
        ("match x:\n    case 1:\n        kept = 1", {"kept"}),
        ("tick()", {"ticks"}),
        ("meter.note(x)", {"self.sum"}),
        ("rate = next(rates)", {"rates"}),
        ("again(x)", set()),
        ("with torch.no_grad():\n    mean = mean * 0.9", {"mean"}),
    ],
)
def test_names_that_are_read_before_they_are_set(body, names):
    text = "for x in loader:\n" + "\n".join(f"    {line}" for line in body.splitlines())
    tree = ast.parse(f"{text}\nprint(kept)\n{FUNCTIONS}")
    assert carried(tree.body[0], tree, functions_of(tree)) == names


def test_a_while_loop_carries_too():
    tree = ast.parse("while step < 5:\n    step += 1")
    assert carried(tree.body[0], tree, {}) == {"step"}
