"""A killed run goes on with the very samples and plain values that it would have had.

G8, G9; interleaving 11 of the failure model. Real processes, a real stack, SIGKILL.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.stack import running_stack

READER = Path(__file__).with_name("reader.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def found(pattern: str, output: str) -> str:
    """Return what the rank printed after this."""
    match = re.search(pattern, output, re.MULTILINE)
    assert match, output
    return match[1]


@pytest.mark.parametrize(
    ("kind", "kills"), [("stateful", (9, 15)), ("wandering", (5, 8))], ids=["stateful", "wandering"]
)
def test_batches_and_plain_values_are_those_of_a_run_that_was_not_killed(stack, kind, kills):
    """Defects L2 and L5 (a StatefulDataLoader with a generator, left by break; killed right after
    that and inside an epoch), L4 (a sampler with a generator and late draws; killed in the first
    epoch and just after it), T2 and T3 (order, removed keys, empty NumPy texts)."""
    [calm] = stack.ranks("--job", f"calm-{kind}", "--kind", kind, script=READER).succeed()
    common = ("--job", kind, "--kind", kind)
    for kill in kills:
        killed = stack.ranks(*common, "--kill-at", str(kill), script=READER)
        killed.wait()
        assert killed.trainers[0].has_done(kill - 1), killed.outputs[0]

    [output] = stack.ranks(*common, script=READER).succeed()

    assert int(found(r"^restored (\d+)", output)) == kills[-1] - 1
    assert found(r"^final (\w{64})$", calm) == found(r"^final (\w{64})$", output)
