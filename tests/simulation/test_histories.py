"""Histories drawn from seeds, and those that once broke something, hold every promise.

And what tells them can be relied on: a plan tells one story, whoever lives through it; a plan that
is cut down still breaks the same; a story's file reads back as the plan it was made from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulation import stories
from tests.simulation.__main__ import main
from tests.simulation.guards import MUTANTS
from tests.simulation.mutants import mutated
from tests.simulation.plan import Plan, Trouble, draw, from_toml, to_toml
from tests.simulation.shrink import TRIES_COUNT_MAX, shrink
from tests.simulation.stories import live

from holdfast_services.agent import shell
from holdfast_services.agent.domain import node_inventory, session_views

ROOT = Path(__file__).parents[2]
CHUNK_SEEDS = 30
SEEDS_COUNT = 300
LAST_LINES = 40
BUSIEST = sorted(range(SEEDS_COUNT), key=lambda seed: -len(draw(seed).troubles))[:3]
TALE_S_MAX = 120.0


def outcome(plan, which):
    """Return nothing, or what to tell who reads the report of the tests."""
    lived = live(plan)
    if not lived.broke:
        return ""
    return "\n".join([
        f"{which}: {lived.broke}",
        *(f"    {line}" for line in lived.story[-LAST_LINES:]),
        lived.trace,
        f"all of it: python -m tests.simulation --tell {which}",
    ])  # fmt: skip


@pytest.mark.parametrize("first", range(0, SEEDS_COUNT, CHUNK_SEEDS))
def test_every_promise_holds_from_seed(first):
    told = [outcome(draw(seed), seed) for seed in range(first, first + CHUNK_SEEDS)]

    if any(told):
        pytest.fail("\n\n".join(filter(None, told)), pytrace=False)


@pytest.mark.parametrize("path", stories.all_stories(), ids=lambda path: path.stem)
def test_what_once_broke_a_promise_breaks_none(path):
    told = outcome(stories.read(path)[1], path.relative_to(ROOT))

    if told:
        pytest.fail(told, pytrace=False)


@pytest.mark.parametrize("seed", BUSIEST)
def test_a_plan_tells_one_story(seed):
    once, again = live(draw(seed)), live(draw(seed))

    assert once.story
    assert once == again


def test_another_process_with_another_hash_seed_tells_the_same_story():
    seed = BUSIEST[0]
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--tell", str(seed)],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}"},
        capture_output=True,
        text=True,
        timeout=TALE_S_MAX,
        check=False,  # it ends with 1 if a promise broke: the story is the same
    )
    story = list(live(draw(seed)).story)

    assert told.stdout.splitlines()[: len(story)] == story, told.stderr


def test_what_is_written_of_a_plan_reads_back():
    plans = [draw(seed) for seed in range(200)]

    assert [from_toml(to_toml(plan)) for plan in plans] == plans


def test_a_story_reads_back_as_its_title_and_plan(tmp_path):
    path = tmp_path / "stories" / "one.toml"
    title, broke = 'A "quiet" node; C:\\temp, größer', 'P5: step "7" was protected'
    stories.write(path, draw(BUSIEST[0]), title, broke, ["    0.500  node b is\nfrozen"])

    assert stories.read(path) == (title, draw(BUSIEST[0]))
    assert tomllib.loads(path.read_text())["broke"] == broke
    assert path.read_text().splitlines()[:5] == [
        f"# {title}",
        "#",
        f"# It broke {broke}",
        "#",
        "#     0.500  node b is frozen",
    ]


def test_a_long_story_is_told_by_its_beginning_and_its_end(tmp_path):
    path = tmp_path / "long.toml"
    stories.write(path, draw(0), "Long", "P1: it", [f"line {number}" for number in range(500)])
    told = [line for line in path.read_text().splitlines() if line.startswith("#")][4:]

    assert stories.LINES_MAX == len(told)
    assert (told[0], told[-1]) == ("# line 0", "# line 499")
    assert "421 lines are left out" in told[stories.FIRST_LINES]


# -- shrinking: what breaks is made up ------------------------------------------------------------

NEEDED = (
    Trouble(at_s=7.318, kind="freeze_node", target="d", for_s=6.437),
    Trouble(at_s=9.204, kind="cut", target="c", other="metadata 1", for_s=2.718),
)
OTHERS = tuple(
    Trouble(at_s=1.5 + number, kind="kill_worker", target=f"worker {number % 2}", for_s=1.234)
    for number in range(9)
)
BIG = Plan(
    seed=12,
    nodes=4,
    metadata=2,
    workers=2,
    world_size=3,
    replicas=2,
    spare_slots=4,
    step_s=0.2,
    save_every=2,
    persist_steps=4,
    keep_last=2,
    lost=0.117,
    slow=0.213,
    troubles=tuple(sorted(NEEDED + OTHERS, key=lambda one: one.at_s)),
)


def breaks_by_kinds(plan):
    """Only the two kinds matter, in their order."""
    kinds = [one.kind for one in plan.troubles if one.kind != "kill_worker"]
    return "P5" if kinds == ["freeze_node", "cut"] else None


def test_shrinking_leaves_what_breaks_and_nothing_else():
    small = shrink(BIG, breaks_by_kinds)

    assert small == Plan(
        seed=12,
        nodes=1,
        world_size=1,
        replicas=0,
        troubles=(
            Trouble(at_s=2.0, kind="freeze_node", target="a", for_s=0.1),
            Trouble(at_s=2.0, kind="cut", target="a", other="metadata 0", for_s=0.1),
        ),
    )


def test_shrinking_keeps_what_matters():
    def breaks(plan):
        long = any(one.for_s > 1.2 and one.kind == "kill_worker" for one in plan.troubles)
        return "P9" if long and plan.lost > 0.1 and plan.replicas == 2 else None

    small = shrink(BIG, breaks)

    assert small == replace(
        Plan(seed=12, world_size=1, workers=1, persist_steps=1, replicas=2, lost=0.12),
        troubles=(Trouble(at_s=2.0, kind="kill_worker", target="worker 0", for_s=1.23),),
    )


def test_shrinking_never_goes_on_to_another_promise():
    def breaks(plan):
        return "P5" if len(plan.troubles) > 4 else "P1"

    assert 5 == len(shrink(BIG, breaks).troubles)


def test_shrinking_asks_only_for_what_can_be_drawn():
    asked = []

    def breaks(plan):
        asked.append(plan)
        return breaks_by_kinds(plan)

    shrink(BIG, breaks)

    assert not [plan for plan in asked if plan.nodes == 1 and plan.replicas]
    assert not [
        plan
        for plan in asked
        for one in plan.troubles
        if (one.target == "d" and plan.nodes < 4)
        or (one.kind == "kill_worker" and not plan.workers)
    ]
    assert len(set(asked)) == len(asked), "asks again what it knows"


def test_shrinking_ends_though_every_plan_breaks_anew():
    tries = 0

    def breaks(plan):
        nonlocal tries
        tries += 1
        return "P5" if tries % 2 else "P1"

    many = replace(BIG, troubles=OTHERS * 200)
    shrink(many, breaks)

    assert tries <= TRIES_COUNT_MAX + 1


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_command_ends_with_what_broke_as_json(capsys, jobs):
    code = main(["--first", "5", "--seeds", "4", "--jobs", jobs, "--json"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert (4, bool(told["broken"])) == (told["seeds"], code == 1)
    assert told["events"] > 0
    assert told["seconds"] > 0
    assert set(told["broken"]) <= {"5", "6", "7", "8"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_mutant_fits_the_product(mutant):
    """One that names text which is gone would be found out a night later, by ``make``."""
    assert mutated(mutant)


def test_an_agent_tells_what_it_would_tell_were_it_asked_anew(monkeypatch):
    """It builds views and inventories only where something in them may have changed."""

    def shows(one, other):
        alike = session_views.shows_alike(one, other)
        for session in other.sessions.values() if alike else ():
            assert session_views.session_view(one, session) == session_views.session_view(
                other, session
            )
        return alike

    def reports(one, other):
        alike = node_inventory.reports_alike(one, other)
        if alike:
            now = node_inventory.inventory(other, incarnation=0, sequence=0)
            assert now == node_inventory.inventory(one, incarnation=0, sequence=0)
        return alike

    monkeypatch.setattr(shell, "shows_alike", shows)
    monkeypatch.setattr(shell, "reports_alike", reports)

    for seed in range(400, 412):
        assert outcome(draw(seed), seed) == ""
