"""What users take away: a whole job, a whole stack; asked first, refused while ranks train."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.stack import running_stack, until
from tests.e2e.test_bit_identity import restored
from tests.e2e.test_faults import levels

JOB = ("--job", "j", "--persist", "5", "--replicas", "1")
PLACES = {"world_size": 2, "nodes": (0, 1)}


def segments(stack):
    return [path for index in (0, 1) for path in stack.arena(index).glob("*.seg")]


def objects(stack):
    return list(Path(stack.info["store"].removeprefix("file://")).rglob("*.json"))


def draining(stack):
    return [row for row in levels(stack, "j").values() if row["draining"]]


def test_a_finished_job_is_removed_everywhere_and_its_name_starts_fresh():
    """F92: neither job nor stack goes while ranks train; the summary comes before the question."""
    with running_stack(nodes=2) as stack:
        ranks = stack.ranks(*JOB, "--steps", "400", "--pause-s", "0.1", **PLACES)
        ranks.until_step(6)
        for command in (("rm", "j", "--yes"), ("down",)):
            refused = stack.holdfast(*command, check=False)
            assert refused.returncode == 1, refused.stdout
            assert "train" in refused.stderr
        until(lambda: objects(stack), "something durable")
        ranks.kill()
        ranks.wait()
        until(lambda: not stack.rest("jobs/j")["running"], "the end of the job")
        refused = stack.holdfast("rm", "j", check=False)
        assert "in the object store" in refused.stderr
        assert "say --yes" in refused.stderr
        assert segments(stack)
        # What a worker puts into the store after the removal waits there for the next sweep.
        until(lambda: not draining(stack), "nothing on its way to the store")

        stack.holdfast("rm", "j", "--yes")

        until(lambda: not segments(stack), "slots freed")
        until(lambda: not objects(stack), "objects deleted")
        assert stack.rest("jobs") == []
        [again, _] = stack.ranks(*JOB, "--steps", "3", **PLACES).succeed()
        assert restored(again) == 0
