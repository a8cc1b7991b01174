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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("declared", [True, False])
def test_a_run_of_low_rank_additions_moves_what_it_changes(declared):
    """G16: by bytes copied and fetched; the first steps' slots were freed and filled again."""
    options = ["--declared"] if declared else []
    with running_stack(nodes=2) as stack:
        [output] = stack.ranks("--steps", str(STEPS), *options, script=SCRIPT).succeed()
        rows = said(output, "step")
        length = int(rows[0][1])
        [(_, trained, _)] = said(output, "final")
        fetched, unchanged = came(stack, 1)

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
        seed = ("--seed", "6")
        [output] = stack.ranks("--steps", str(STEPS), *seed, *options, script=SCRIPT).succeed()
        assert [(str(STEPS), trained, "")] == said(output, "restored")

        # On the other one, from the copies that were fetched in parts.
        ranks = stack.ranks("--steps", str(STEPS), *seed, *options, nodes=(1,), script=SCRIPT)
        [output] = ranks.succeed()
        assert [(str(STEPS), trained, "")] == said(output, "restored")
