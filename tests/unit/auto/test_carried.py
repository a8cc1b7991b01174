"""What a training loop carries from batch to batch is found in its source."""

from __future__ import annotations

import ast
import runpy

import pytest

from holdfast.auto.carried import carried, carried_names
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


class Asked:
    """Looks for what the loops carry that ask for a batch."""

    def __init__(self):
        self.names = None

    def batch(self):
        self.names = carried_names(lambda value: isinstance(value, Asked))


def test_a_list_in_a_generator_goes_over_a_whole_pass():
    """From Python 3.12 on it has no frame of its own, and the generator's stands for it."""
    asked = Asked()

    def lists():
        while True:
            yield [batch for batch in map(lambda _: asked.batch(), "a")]  # noqa: C416, C417

    made = lists()
    for _round in range(2):
        next(made)

    assert asked.names == []


@pytest.mark.parametrize(
    ("folder", "names"), [("own", ["_", "n"]), ("dist-packages", []), ("site-packages", [])]
)
def test_loops_of_libraries_are_none_of_the_script_wherever_they_are(tmp_path, folder, names):
    """As those of a venv that sees what is installed outside of it."""
    path = tmp_path / folder / "loops.py"
    path.parent.mkdir()
    path.write_text("def loop(ask):\n    n = 0\n    for _ in 'ab':\n        n += ask() or 1\n")
    asked = Asked()

    runpy.run_path(str(path))["loop"](asked.batch)

    assert asked.names == names
