"""The object tier as its users meet it: real stacks, torch ranks, stores that outlive both.

Each test is a row of docs/explanation/failure-model.md. Real processes throughout.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.e2e.stack import SharedStack, Stack, running_stack, until
from tests.e2e.test_bit_identity import final, finals, restored
from tests.e2e.test_faults import flip_a_byte, levels

TWO_NODES = {"world_size": 2, "nodes": (0, 1)}
# Step 10 is durable before step 12 is done, where both ranks die.
UNTIL_12 = (
    *("--steps", "12", "--persist", "5"),
    *("--wait", "replicated", "--wait-durable", "10"),
    *("--kill-at", "12", "--kill-ranks", "0", "1"),
)
AGAIN = ("--steps", "12", "--persist", "5", "--wait", "replicated")


STACK = SharedStack(nodes=2, HOLDFAST_NODE_LEASE_S="2", HOLDFAST_DECIDE_WAIT_S="4")


def durable(stack: Stack, job: str) -> list[int]:
    """Return the steps of a job that are durable, oldest first."""
    rows = levels(stack, job).values()
    return sorted(row["step"] for row in rows if row["durable_at"] is not None)


def store_of(stack: Stack) -> Path:
    """Return the folder that is the embedded stack's object store."""
    return Path(stack.info["store"].removeprefix("file://"))


def checkpoint_folder(stack: Stack, job: str, step: int) -> Path:
    """Return the folder of a durable checkpoint."""
    (found,) = store_of(stack).glob(f"{job}/*/step-{step}.g*")
    return found


def lose_all_memory(stack: Stack) -> None:
    """Kill both agents and remove what they held; the supervisor starts them again, empty."""
    pids = [stack.agent_pid(0), stack.agent_pid(1)]
    for index, pid in enumerate(pids):
        os.kill(pid, signal.SIGSTOP)
        for path in stack.arena(index).glob("*.*"):
            path.unlink(missing_ok=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: all(stack.agent_pid(i) not in (None, pids[i]) for i in (0, 1)), "two fresh agents"
    )


def test_a_run_whose_every_node_lost_its_memory_comes_back_from_the_object_store(stack, job):
    """P5, F67, G3: both agents and both arenas gone; the durable step is what is left."""
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()
    lose_all_memory(stack)

    outputs = stack.ranks("--job", job, *AGAIN, **TWO_NODES).succeed()

    assert [restored(text) for text in outputs] == [10, 10]
    assert [final(text) for text in outputs] == expected
    tiers = [re.search(r"^restored 10 (.*)$", text, re.MULTILINE)[1] for text in outputs]
    # What one node has fetched from the store already the other may take from it, or hold as its
    # copy before its rank asks.
    assert any("'object'" in text for text in tiers), tiers


def test_another_cluster_with_nothing_but_the_bucket_goes_on_by_job_name(stack, job):
    """F74, P6: no shared catalogue, no shared memory; only the store is the same."""
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()

    with running_stack(nodes=1, HOLDFAST_STORE=stack.info["store"]) as other:
        outputs = other.ranks("--job", job, *AGAIN[:-2], "--wait", "local", world_size=2).succeed()

        assert [restored(text) for text in outputs] == [10, 10]
        assert [final(text) for text in outputs] == expected


def test_down_and_up_keep_what_is_durable_and_nothing_else(stack, job):
    """``down`` throws memory away; it must not make the next run lose what was stored."""
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()
    stack.holdfast("down")

    stack.holdfast("up", "--nodes", "2")
    stack.reread()
    outputs = stack.ranks("--job", job, *AGAIN, **TWO_NODES).succeed()

    assert [restored(text) for text in outputs] == [10, 10]
    assert [final(text) for text in outputs] == expected


def test_a_catalogue_that_is_gone_is_rebuilt_from_agents_and_bucket(stack, job):
    """P6: metadata starts with an empty database; doctor --rebuild finds all durable steps."""
    stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()
    before = durable(stack, job)
    supervisor, metadata = stack.pid("holdfast_services.supervisor"), stack.metadata_pid()
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(metadata, signal.SIGKILL)
    for path in stack.home.glob("metadata.db*"):
        path.unlink()
    os.kill(supervisor, signal.SIGCONT)
    until(lambda: stack.metadata_pid() not in (None, metadata), "a fresh metadata service")
    until(lambda: _answers(stack), "its REST")

    report = stack.holdfast("doctor", "--rebuild")

    assert before == durable(stack, job) == [5, 10], report.stdout
    outputs = stack.ranks("--job", job, *AGAIN, **TWO_NODES).succeed()
    assert [restored(text) for text in outputs] == [11, 11]  # of memory, by the inventories


def _answers(stack: Stack) -> bool:
    try:
        return isinstance(stack.rest("jobs"), list | dict)
    except OSError:
        return False


def test_a_corrupt_object_is_found_and_an_older_step_restored(stack, job):
    """P3, F68-F70: the newest durable step has a flipped byte, the one before is whole."""
    expected = finals(stack, steps="12", world_size=2)
    stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()
    until(lambda: durable(stack, job) == [5, 10], "two durable steps")
    lose_all_memory(stack)
    damaged = checkpoint_folder(stack, job, 10)
    flip_a_byte(next(damaged.glob("shard-00001*.safetensors")))

    outputs = stack.ranks("--job", job, *AGAIN, **TWO_NODES).succeed()

    assert [restored(text) for text in outputs] == [5, 5]
    assert [final(text) for text in outputs] == expected
    checked = stack.holdfast("verify", f"file://{damaged}", check=False)
    assert 1 == checked.returncode
    assert "shard-00001" in checked.stdout + checked.stderr


def test_a_worker_that_is_killed_again_and_again_loses_nothing(stack, job):
    """G10, P4: SIGKILL of the worker just before each save that is due; each becomes durable."""
    due = [10, 20, 30, 40, 50, 60]
    ranks = stack.ranks(
        *("--job", job, "--steps", "60", "--pause-s", "0.1", "--persist", "10"),
        *("--wait-durable", *map(str, due)),
        **TWO_NODES,
    )
    killed: set[int] = set()
    for step in due:
        ranks.until_step(step - 1)
        pid = until(lambda: stack.pid("holdfast_services.persistence"), "a worker to kill")
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    ranks.succeed()

    assert len(due) == len(killed), "one worker for each save that was due"
    assert due == durable(stack, job)
    for step in due:
        folder = checkpoint_folder(stack, job, step)
        assert {"manifest.json"} | {
            f"shard-{rank:05}-of-00002.{suffix}"
            for rank in (0, 1)
            for suffix in ("safetensors", "sum")
        } == {path.name for path in folder.iterdir()}
        assert 0 == stack.holdfast("verify", f"{job}@{step}", "--tier", "object").returncode


def test_retention_leaves_the_last_ones_and_never_what_is_pinned(stack, job):
    """F87, G11: keep-last-2 while a pin holds the first one."""
    ranks = stack.ranks(
        *("--job", job, "--steps", "41", "--persist", "5", "--keep-last", "2"),
        *("--wait-durable", "5", "10", "20", "30", "40", "--pause-s", "0.05"),
        **TWO_NODES,
    )
    ranks.until_step(5)
    stack.holdfast("pin", f"{job}@5")
    ranks.succeed()

    until(lambda: len(list(store_of(stack).glob(f"{job}/*/step-*"))) == 3, "three folders left")
    until(lambda: len(durable(stack, job)) == 3, "three rows left")
    assert 5 == durable(stack, job)[0]
    assert 40 == durable(stack, job)[-1]


def test_a_job_on_ceph_survives_the_cluster(ceph, job):
    """F85, F67 on a real S3: drained by multipart, restored by ranged reads, on new nodes."""
    settings = {"HOLDFAST_STORE": ceph.url(), **ceph.environment}
    with running_stack(nodes=2, **settings) as stack:
        expected = finals(stack, steps="12", world_size=2)
        stack.ranks("--job", job, *UNTIL_12, **TWO_NODES).wait()
        until(lambda: 10 in durable(stack, job), "step 10 on Ceph")
    with running_stack(nodes=2, **settings) as other:
        outputs = other.ranks("--job", job, *AGAIN, **TWO_NODES).succeed()

        assert [restored(text) for text in outputs] == [10, 10]
        assert [final(text) for text in outputs] == expected
        assert 0 == other.holdfast("verify", f"{job}@10", "--tier", "object").returncode
