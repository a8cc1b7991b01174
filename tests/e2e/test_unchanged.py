"""What does not change is copied and sent once for each slot, and every restore has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.lora_trainer import LAYERS, SIZE
from tests.e2e.stack import running_stack

from holdfast.cli.probes import probe_agent
from holdfast.format.digest import PART_BYTES

SCRIPT = Path(__file__).with_name("lora_trainer.py")
STEPS = 7
BASE_BYTES = LAYERS * SIZE * SIZE * 4


def came(stack, index):
    """Return the bytes that a node has fetched, and those that were there already."""
    facts = probe_agent(Path(stack.node(index)["agent"]))
    return sum(one.fetched_bytes for one in facts.transports), facts.unchanged_bytes


def said(output, word):
    return re.findall(rf"^{word} (\S+) (\S+) ?(\S*)$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("declared", "seed"), [(True, "5"), (False, "6")], ids=["declared", "found"]
)
def test_a_run_of_low_rank_additions_moves_what_it_changes(stack, job, declared, seed):
    """G16: by bytes copied and fetched; the first steps' slots were freed and filled again."""
    options = ["--job", job, *(["--declared"] if declared else [])]
    before = came(stack, 1)
    # Each has a seed of its own: what lies in freed slots would do for another job, too.
    run = ("--steps", str(STEPS), "--seed", seed, *options)
    [output] = stack.ranks(*run, script=SCRIPT).succeed()
    rows = said(output, "step")
    length = int(rows[0][1])
    [(_, trained, _)] = said(output, "final")
    fetched, unchanged = (now - then for now, then in zip(came(stack, 1), before, strict=True))

    # The parts with the header and what learns, and the one with the text at the end.
    parts = -(-length // PART_BYTES)
    changing = PART_BYTES + length - (parts - 1) * PART_BYTES
    assert STEPS == len(rows)
    assert 2 * length + (STEPS - 2) * changing == fetched
    assert STEPS * length == fetched + unchanged
    kept = [int(row[2]) for row in rows]
    assert kept == ([0, 0, *[BASE_BYTES] * (STEPS - 2)] if declared else [0] * STEPS)
    print(f"segment {length}, fetched {changing}, copied {length - kept[-1]} a save")

    # On the owner's node, from its own memory; another seed says whether all was restored.
    again = ("--steps", str(STEPS), "--seed", "7", *options)
    [output] = stack.ranks(*again, script=SCRIPT).succeed()
    assert [(str(STEPS), trained, "")] == said(output, "restored")

    # On the other one, from the copies that were fetched in parts.
    [output] = stack.ranks(*again, nodes=(1,), script=SCRIPT).succeed()
    assert [(str(STEPS), trained, "")] == said(output, "restored")
