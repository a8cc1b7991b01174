"""A state that several ranks hold together comes back: on the same mesh bit for bit, and on others.

F76, F78, F79, G5: FSDP2, HSDP, tensor parallel and both at once. Real processes, a real stack.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.stack import Stack, running_stack, until
from tests.e2e.test_bit_identity import final, restored, told
from tests.e2e.test_docs import newest_step

RANK = Path(__file__).with_name("mesh_trainer.py")


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=2) as running:
        yield running


def launch(stack: Stack, job: str, mesh: str, world_size: int, *more: str):
    return stack.ranks(
        *("--job", job, "--mesh", mesh, *more),
        world_size=world_size,
        nodes=(0, 1),
        script=RANK,
    )


def digests(output: str, word: str) -> dict[int, str]:
    """Return the digest of the whole state by step, as it was ``loaded``, or after a ``step``."""
    found = re.findall(rf"^{word} (\d+) (?:\w+ )?([0-9a-f]{{64}})$", output, re.MULTILINE)
    return {int(step): digest for step, digest in found}


@pytest.mark.parametrize(
    ("mesh", "world_size"),
    [
        ("fsdp", 2),
        ("hsdp", 4),
        ("tp", 2),
        ("2d", 4),
        ("fsdp1-grad-op", 2),
        ("zero", 2),
        ("3d", 8),
    ],
)
def test_a_mesh_comes_back_bit_identical_after_a_kill(stack, mesh, world_size):
    """A forward without a backward has left whole parameters in FSDP's tables at each save.

    The model that it comes back into is on the meta device and has no memory until then, except
    for DDP, which wants to see values.
    """
    steps = ("--steps", "5")
    calm = launch(stack, f"calm-{mesh}", mesh, world_size, "--calm", *steps).succeed()
    killed = ("--kill-at", "4", "--kill-ranks", "1")
    launch(stack, mesh, mesh, world_size, *steps, *killed).wait()
    lengths = {path.stat().st_size for path in stack.arena(0).glob("*.seg")}

    meta = [] if mesh == "zero" else ["--meta"]
    outputs = launch(stack, mesh, mesh, world_size, *steps, *meta).succeed()

    assert [restored(text) for text in outputs] == [3] * world_size
    assert [final(text) for text in outputs] == [final(text) for text in calm]
    for text in outputs:
        assert "fetching" not in text
        # F80: a process has crashed and no node: of what it needs nothing comes from peers.
        tiers = json.loads(told("restored", text).partition(" ")[2].replace("'", '"'))
        assert list(tiers) == ["memory"], mesh
        # Where each rank's boxes are its own, they are in its segment, and that is here.
        assert mesh not in ("fsdp", "fsdp1-grad-op") or tiers["memory"] in lengths


ROUTES = [
    ["fsdp 4", "fsdp 2", "2d 4", "fsdp1 3", "hsdp 4", "tp 2", "fsdp 1", "fsdp1 2", "ddp 2"],
    ["ddp 2", "fsdp1 3", "zero 2", "3d 8", "zero 3", "fsdp1-hybrid 4", "zero 4", "fsdp 3"],
]


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_a_job_goes_on_on_one_mesh_after_the_other(stack, route):
    """Four ranks, two, a grid, one …: each begins with the very bits that the last one left."""
    before, steps, job = "", 0, f"wanders-{ROUTES.index(route)}"
    for mesh, world_size in map(str.split, route):
        steps += 2
        outputs = launch(stack, job, mesh, int(world_size), "--steps", str(steps)).succeed()

        assert not any("fetching" in text for text in outputs), (mesh, world_size)
        loaded = {digests(text, "loaded")[steps - 2] for text in outputs}
        assert loaded == {before} or not before, (mesh, world_size)
        [before] = {digests(text, "step")[steps] for text in outputs}


def test_a_part_is_restored_on_another_number_of_ranks_and_the_rest_is_new(stack):
    """4 -> 2 and 2 -> 3 ranks: the model, the optimizer, and both beside what is only here."""
    saved = {
        size: parts(launch(stack, f"parts-{size}", "fsdp", size, "--steps", "2").succeed())[1]
        for size in (4, 2)
    }
    fresh = parts(launch(stack, "nothing", "fsdp", 1, "--steps", "0").succeed())[0]
    for before, mesh, after, *asked in (
        (4, "tp", 2, "--only", "model"),
        (2, "fsdp", 3, "--only", "optimizer"),
        (4, "fsdp", 3, "--lenient"),
    ):
        restore = launch(stack, f"parts-{before}", mesh, after, *asked, "--steps", "2")
        outputs = restore.succeed()

        loaded = asked[1:] or ["model", "optimizer"]
        assert {**fresh, **{part: saved[before][part] for part in loaded}} == parts(outputs)[0]
    assert all("keep their values: more" in text for text in outputs)


def parts(outputs):
    """Return the digests of model and optimizer, as they were loaded and as they were left."""
    found = [re.findall(r"^part (\w+) ([0-9a-f]{64})$", text, re.MULTILINE) for text in outputs]
    assert all(one == found[0] for one in found)
    return dict(found[0][:2]), dict(found[0][2:])


def test_each_example_is_killed_and_the_next_one_goes_on_on_its_mesh(stack):
    """As their docstrings say they are run, but for torchrun; 4 -> 2 -> 3 ranks at the end."""
    safe = 0
    examples = ("hsdp", 4), ("fsdp2_tp", 4), ("fsdp1", 3), ("fsdp2", 4), ("fsdp2", 2)
    for name, world_size in examples:
        ranks = example(stack, name, world_size)
        until(partial(reaches, stack, safe + 10), f"{name} to have saved step {safe + 10}")
        ranks.trainers[1].process.kill()
        ranks.wait()
        [begun] = {int(told("begins at step", text)) for text in ranks.outputs}
        assert begun >= safe, name
        safe = newest_step(stack, "meshes")

    outputs = example(stack, "fsdp2", 3, "--steps", str(safe + 20)).succeed()
    [begun] = {int(told("begins at step", text)) for text in outputs}
    assert begun >= safe
    assert told(f"step {begun + 10}:", outputs[0]).startswith("loss")


def example(stack: Stack, name: str, world_size: int, *more: str):
    """Run one of the examples, its ranks on two nodes in turn."""
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    return stack.ranks(*more, world_size=world_size, nodes=(0, 1), script=script)


def reaches(stack: Stack, step: int) -> bool:
    return newest_step(stack, "meshes") >= step


def test_experts_are_dealt_out_to_other_ranks_after_each_kill(stack):
    """F78: on a submesh, copied or sharded on the other axis; the bits are those of one process."""
    script = RANK.with_name("expert_trainer.py")

    def train(job, world_size, *more):
        return stack.ranks("--job", job, *more, world_size=world_size, nodes=(0, 1), script=script)

    [alone] = train("alone", 1, "--steps", "12").succeed()
    expected, steps = digests(alone, "step"), 0
    for world_size, more in (
        (4, ["--experts", "2"]),
        (4, ["--experts", "4"]),
        (4, ["--experts", "2", "--sharded"]),
        (2, ["--experts", "2"]),
        (4, ["--experts", "1"]),
        (1, []),
    ):
        steps += 2
        ranks = train("experts", world_size, *more, "--steps", str(steps), "--kill-at", str(steps))
        ranks.wait()

        for text in ranks.outputs:
            loaded, made = digests(text, "loaded"), digests(text, "step")
            [begun] = loaded
            assert begun == max(0, steps - 3), more
            assert made.keys() == set(range(begun + 1, steps)), more
            assert all(expected[step] == digest for step, digest in made.items()), more
            assert not begun or loaded[begun] == expected[begun], more
