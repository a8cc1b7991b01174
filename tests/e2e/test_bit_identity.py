"""A run that was killed and came back ends with the same bits as one that was not.

G8, G9; interleavings 10 and 11 of the failure model. Real processes, a real stack, SIGKILL.
"""

from __future__ import annotations

import re

import pytest
from tests.e2e.stack import Stack, running_stack

STEPS = "20"
KILL_AT = "14"


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


def final(output: str) -> str:
    """Return the fingerprint that a rank printed."""
    found = re.search(r"^final ([0-9a-f]{64})$", output, re.MULTILINE)
    assert found, output
    return found[1]


def restored(output: str) -> int:
    """Return the step that a rank restored."""
    found = re.search(r"^restored (\d+)", output, re.MULTILINE)
    assert found, output
    return int(found[1])


_CALM: dict[tuple[object, ...], list[str]] = {}


def finals(stack: Stack, *, steps: str, scenario: str = "adamw", world_size: int = 1) -> list[str]:
    """Return the fingerprint of every rank of a run that saves nothing and is not disturbed.

    Each kind of run is made once.
    """
    key = (steps, scenario, world_size)
    if key not in _CALM:
        nodes = (0, 1)[:world_size]
        arguments = (
            "--job",
            f"calm-{scenario}-{steps}-{world_size}",
            "--scenario",
            scenario,
            "--steps",
            steps,
            "--save",
            "never",
        )
        ranks = stack.ranks(*arguments, world_size=world_size, nodes=nodes)
        _CALM[key] = [final(text) for text in ranks.succeed()]
    return _CALM[key]


SCENARIOS = ["adamw", "fused", "in_backward", "ema", "swapped", "by_hand", "frozen"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_process_comes_back_bit_identical(stack, scenario):
    """S1; interleavings 10 and 11; defects A2, A8: every kind of update, dropout, BatchNorm, a
    shuffled loader in the middle of its second epoch. Each copy is kept in flight until the next
    update comes: without what protects it, what is restored has two steps in it."""
    common = ("--scenario", scenario, "--steps", STEPS, "--save", "1", "--wait", "replicated")
    expected = finals(stack, steps=STEPS, scenario=scenario)
    killed = stack.ranks("--job", scenario, *common, "--hold-copies", "--kill-at", KILL_AT)
    killed.wait()

    [output] = stack.ranks("--job", scenario, *common, "--hold-copies").succeed()

    assert 0 < restored(output) < int(KILL_AT)  # a busy machine may have cost a save
    assert f"\nheld {restored(output)}\n" in killed.outputs[0]
    assert [final(output)] == expected


@pytest.mark.parametrize("kill_at", ["12", "13"])
def test_an_epoch_boundary_is_no_exception(stack, kill_at):
    """A checkpoint of the last step of an epoch (12), and of the first of the next (13): the next
    iterator draws from the restored generator exactly as the first run's did."""
    job = f"boundary-{kill_at}"
    common = ("--steps", STEPS, "--save", "1", "--wait", "local")
    expected = finals(stack, steps=STEPS)
    stack.ranks("--job", job, *common, "--kill-at", str(int(kill_at) + 1)).wait()

    [output] = stack.ranks("--job", job, *common).succeed()

    assert restored(output) == int(kill_at)
    assert [final(output)] == expected


def test_two_ddp_ranks_come_back_bit_identical_after_one_is_killed(stack):
    """P5, F37: the ranks share the state between them; both load all of it."""
    common = ("--steps", STEPS, "--save", "1", "--wait", "replicated")
    places = {"world_size": 2, "nodes": (0, 1)}
    expected = finals(stack, steps=STEPS, world_size=2)
    killed = stack.ranks(
        "--job", "ddp", *common, "--kill-at", KILL_AT, "--kill-ranks", "1", **places
    )
    killed.wait()

    outputs = stack.ranks("--job", "ddp", *common, **places).succeed()

    assert [restored(text) for text in outputs] == [int(KILL_AT) - 1] * 2
    assert [final(text) for text in outputs] == expected
    tiers = [re.findall(r"'(\w+)': \d+", told("restored", text)) for text in outputs]
    assert tiers == [["memory"]] * 2  # a process has crashed and no node: nothing comes from peers


def told(word: str, output: str) -> str:
    """Return the rest of the line that begins with ``word``."""
    found = re.search(rf"^{word} (.+)$", output, re.MULTILINE)
    assert found, output
    return found[1]


def test_four_ddp_ranks_come_back_bit_identical(stack):
    """G9, issue 7: with three or more the order of sums counts, and it is put back. The kinds of
    wrappers are in tests/integration/ddp."""
    common = ("--steps", STEPS, "--ddp", '{"bucket_cap_mb": 0.004}')
    places = {"world_size": 4, "nodes": (0, 1)}
    undisturbed = stack.ranks("--job", "four-calm", *common, "--save", "100", **places)
    expected = [final(text) for text in undisturbed.succeed()]
    saving = ("--job", "four", *common, "--save", "1", "--wait", "local")
    stack.ranks(*saving, "--kill-at", KILL_AT, "--kill-ranks", "2", **places).wait()

    outputs = stack.ranks(*saving, **places).succeed()

    assert [restored(text) for text in outputs] == [int(KILL_AT) - 1] * 4
    assert [final(text) for text in outputs] == expected


def state_at(word: str, output: str) -> tuple[str, str]:
    """Return the digest of the shared state and that of the random stream that a rank printed."""
    found = re.search(rf"^{word} (\w+) (.+)$", output, re.MULTILINE)
    assert found, output
    return found[1], found[2]


def losses(output: str) -> list[float]:
    """Return the loss of each step that a rank printed."""
    return [float(text) for text in re.findall(r"^step \d+ \S+ (\S+)$", output, re.MULTILINE)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_ddp_run_goes_on_with_another_number_of_ranks(stack, world_size):
    """F75, F76: shared state is what was saved; state of one rank follows the written rule; and
    the run goes on learning."""
    job = f"elastic-{world_size}"
    before = stack.ranks(
        "--job", job, "--save", "1", "--wait", "replicated", "--steps", "9",
        world_size=2, nodes=(0, 1),
    ).succeed()  # fmt: skip

    outputs = stack.ranks(
        "--job", job, "--save", "10", "--steps", "60",
        world_size=world_size, nodes=(0, 1)[:world_size],
    ).succeed()  # fmt: skip

    assert [restored(text) for text in outputs] == [9] * world_size
    [saved] = {state_at("left", text)[0] for text in before}
    loaded = [state_at("loaded", text) for text in outputs]
    streams = {stream for _, stream in loaded}
    assert [digest for digest, _ in loaded] == [saved] * world_size
    assert len(streams) == world_size
    assert not streams & {state_at("left", text)[1] for text in before}
    assert len({re.search(r"^learned \w+$", text, re.MULTILINE)[0] for text in outputs}) == 1
    assert state_at("left", outputs[0])[0] != saved
    for text in outputs:
        assert len(losses(text)) == 60 - 9
        assert sum(losses(text)[-9:]) < 0.8 * sum(losses(before[0]))
