"""What a bucket holds, found by names alone (P6)."""

from __future__ import annotations

import pytest
from tests.unit.bucket.folders import JOB, make

from holdfast.bucket.listing import places
from holdfast.core.ids import CheckpointId
from holdfast.errors import InvalidRequestError
from holdfast.format.keys import Place
from holdfast.objectstore.memory import MemoryStore


def found(store, job=None):
    return [
        (p.job, p.checkpoint.run, p.checkpoint.step, p.checkpoint.generation)
        for p in places(store, job)
    ]


@pytest.fixture
def store():
    store = MemoryStore()
    make(store, CheckpointId("r7", 1200, 3)).write()
    make(store, CheckpointId("r7", 900, 3)).write()
    make(store, CheckpointId("r8", 1, 1)).write()
    make(store, CheckpointId("r1", 5, 1), job="team").write()
    make(store, CheckpointId("r1", 5, 1), job="team/gpt/r7").write()
    make(store, CheckpointId("r1", 6, 1), job="solo").write()
    return store


def test_every_checkpoint_with_a_manifest_is_found(store):
    assert sorted(found(store)) == [
        ("solo", "r1", 6, 1),
        ("team", "r1", 5, 1),
        ("team/gpt", "r7", 900, 3),
        ("team/gpt", "r7", 1200, 3),
        ("team/gpt", "r8", 1, 1),
        ("team/gpt/r7", "r1", 5, 1),
    ]


def test_a_job_is_listed_without_jobs_whose_names_begin_alike(store):
    assert sorted(found(store, JOB)) == [
        ("team/gpt", "r7", 900, 3), ("team/gpt", "r7", 1200, 3), ("team/gpt", "r8", 1, 1),
    ]  # fmt: skip
    assert [("team", "r1", 5, 1)] == found(store, "team")
    assert [] == found(store, "tea")


def test_a_folder_without_manifest_is_none(store):
    store.delete(["solo/r1/step-6.g1/manifest.json"])

    assert [] == found(store, "solo")
    assert "solo" not in {job for job, *_ in found(store)}


def test_names_that_are_not_ours_are_passed_over(store):
    for key in (
        "solo/r1/step-06.g1/manifest.json",
        "solo/r1/step-7/manifest.json",
        "solo/R_1/step-7.g1/manifest.json",
        "solo/r1/deeper/step-8.g1/x/manifest.json",
        "manifest.json",
        "step-9.g1/manifest.json",
        "a b/r1/step-9.g1/manifest.json",
        "solo/r1/step-9.g1.bak/manifest.json",
    ):
        store.put(key, b"{}")

    assert [("solo", "r1", 6, 1)] == found(store, "solo")
    assert 6 == len(found(store))


def test_a_job_whose_name_looks_like_a_checkpoint_is_found():
    store = MemoryStore()
    make(store, CheckpointId("r1", 5, 1), job="a/b/step-1.g1").write()

    assert [("a/b/step-1.g1", "r1", 5, 1)] == found(store)


def test_no_job_name_is_refused(store):
    with pytest.raises(InvalidRequestError, match="job name"):
        list(places(store, "../x"))


def test_a_place_is_what_the_keys_say(store):
    assert Place("solo", CheckpointId("r1", 6, 1)) == next(places(store, "solo"))
