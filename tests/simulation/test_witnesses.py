"""Witnesses: kept plans on which a mutant breaks, and the product does not.

``make simulate-mutants`` tries each against its mutant; here all are lived through with the
product, and a handful with theirs.
"""

from __future__ import annotations

import pytest
from tests.simulation import stories
from tests.simulation.guards import MUTANTS
from tests.simulation.mutants import ROOT, broken_by, witnesses
from tests.simulation.stories import live

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
FILES = sorted(path for path in (ROOT / "tests/simulation/witnesses").glob("*.toml"))
HANDFUL = ("late-news", "unacknowledged", "M7-read")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_product_holds_every_promise_where_a_mutant_breaks_one(path):
    lived = live(stories.read(path)[1])

    assert not lived.broke, "\n".join(lived.story)


def test_a_witness_names_mutants_that_there_are():
    assert witnesses().keys() <= BY_NAME.keys()


@pytest.mark.parametrize("name", HANDFUL)
def test_a_mutant_breaks_on_its_witness(name):
    missed = broken_by(BY_NAME[name], ROOT, 0)

    assert missed.broken.keys() == {name.lower()}


def test_a_product_with_all_its_guards_is_not_missed():
    """The copy that is lived through is the one that was changed, and the witness is not all."""
    guarded = type(BY_NAME["late-news"])("late-news", "nothing", ())

    assert not broken_by(guarded, ROOT, 0).broken
