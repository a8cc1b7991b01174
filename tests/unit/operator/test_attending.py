"""What is done about a HoldfastJob (F95, F105, F107)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.objects import deleted, example

from holdfast.core.records import to_record
from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.attending import (
    SEEN,
    Cancel,
    Hold,
    Release,
    Submit,
    Tell,
    attend,
    refused_status,
    status_of,
)
from holdfast_services.operator.domain.job_specs import FIELDS, spec_of

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
STATES = ("queued", "starting", "running", "rescaling", "ended", "failed", "cancelled")


def document(state="running", id_="s-1", **what):
    return {
        "job": "default.gpt", "id": id_, "state": state, "message": "", "why": "it is fastest so",
        "gpus": 3, "nodes": {"a": 2, "b": 1}, "allocation": 7, **what,
    }  # fmt: skip


def told(state="running", id_="s-1"):
    job = example()
    job["status"] = status_of(job, document(state, id_), NOW)
    return job


def attended(job, doc, *, pods=False):
    return list(attend(job, doc, pods=pods, now=LATER))


def conditions(status):
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_the_spec_is_that_of_a_job():
    spec = spec_of(example(gpusMin=2, gpuTypes=["H100"], epochs=3, samples=1000, retries=2))

    assert spec.name == "default.gpt"
    assert spec.command == ("--auto", "train.py", "--lr", "3e-4")
    assert (spec.gpus_min, spec.gpus_max, spec.priority, spec.owner) == (2, 16, 5, "ada")
    assert (spec.gpu_types, spec.epochs, spec.samples, spec.retries) == (("H100",), 3, 1000, 2)
    assert spec.environment == {"OMP_NUM_THREADS": "4"}
    assert spec.grace_s == 60.0


@pytest.mark.parametrize(
    ("spec", "culprit"),
    [
        ({"gpusMax": "many"}, "gpus_max"),
        ({"gpu": 3}, "spec.gpu is not known"),
        ({"template": {}}, "spec.template.spec.containers is empty"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(spec, culprit):
    with pytest.raises(InvalidRequestError, match=culprit):
        spec_of(example(**spec))


def test_a_name_that_is_no_label_is_refused():
    job = example()
    job["metadata"]["name"] = "x" * 64
    with pytest.raises(InvalidRequestError, match="64 characters"):
        spec_of(job)


def test_an_object_is_held_before_its_job_is_submitted():
    job = example()
    job["metadata"]["finalizers"] = ["another.one/x"]

    assert attended(job, None) == [Hold()]
    assert attended(example(), None) == [Submit()]


def test_a_job_is_submitted_once():
    """Also when the operator is started again after the job is over."""
    for state in STATES:
        assert Submit() not in attended(told(state), document(state))
    assert attended(told("ended"), None) == []
    assert attended(told("ended"), document("running", "s-2")) == [], "somebody else's"


def test_a_scheduler_that_has_lost_its_database_is_told_again():
    assert attended(told("running"), None) == [Submit()]


def test_what_was_refused_for_good_waits_for_another_spec():
    job = example()
    job["status"] = refused_status(job, "gpus_min is 0", NOW, final=True)
    assert attended(job, None) == []
    assert conditions(job["status"]) == {"Accepted": ("False", "Refused")}

    job["metadata"]["generation"] += 1
    assert attended(job, None) == [Submit()]


def test_what_fits_no_nodes_is_tried_again():
    job = example()
    job["status"] = refused_status(job, "wants 16 GPUs, all nodes have 8", NOW, final=False)

    assert attended(job, None) == [Submit()]


def test_the_status_follows_the_scheduler():
    job = told("queued")
    (tell,) = attended(job, document("running"))

    assert tell.status["nodes"] == {"a": 2, "b": 1}
    assert conditions(tell.status) == {
        "Accepted": ("True", "Submitted"),
        "Running": ("True", "Running"),
        "Finished": ("False", "NotYet"),
    }
    times = {one["type"]: one["lastTransitionTime"] for one in tell.status["conditions"]}
    assert times == {"Accepted": NOW, "Running": LATER, "Finished": NOW}
    assert attended({**job, "status": tell.status}, document("running")) == [], "told once"


@pytest.mark.parametrize("state", ["ended", "failed", "cancelled"])
def test_the_end_is_a_condition_with_its_message(state):
    (tell,) = attended(told(), document(state, message="ValueError: bad batch"))
    finished = next(one for one in tell.status["conditions"] if one["type"] == "Finished")

    assert (finished["status"], finished["reason"]) == ("True", state.capitalize())
    assert finished["message"] == "ValueError: bad batch"


def test_a_deleted_object_goes_when_its_job_has_ended_and_left_no_pod():
    job = deleted(told())

    assert attended(job, document("running"), pods=True) == [Cancel()]
    assert attended(job, document("cancelled"), pods=True) == []
    assert attended(job, document("cancelled")) == [Release()]
    assert attended(job, None) == [Release()]


def test_a_submission_that_nobody_noted_is_cancelled_with_its_object():
    """Submitting the same again would find it; another job of this name is somebody else's."""
    job = deleted(example())
    spec = to_record(spec_of(job))
    same = document("queued", **{**spec, "environment": sorted(spec["environment"])})
    for status in ({}, refused_status(job, "no nodes for so many GPUs", NOW, final=False)):
        job["status"] = status
        assert attended(job, same) == [Cancel()]
        assert attended(job, {**same, "state": "cancelled"}) == [Release()]
        for key in SEEN:
            assert attended(job, {**same, key: "x"}) == [Release()], "it is somebody else's"
    for state, what in (("running", Cancel()), ("ended", Release())):
        job = deleted(told(state))
        assert attended(job, {**same, "id": "s-2"}) == [what], "taken on again, or long over"


@given(
    st.booleans(), st.booleans(), st.sampled_from([None, *STATES]),
    st.sampled_from([None, *STATES]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_nothing_is_let_go_while_something_of_it_is_left(held, gone, status, state, same, pods):
    """All cases: what is deleted neither stays for ever nor leaves a job that nobody governs."""
    job = example() if status is None else told(status)
    job["metadata"]["finalizers"] = job["metadata"]["finalizers"] if held else []
    job = deleted(job) if gone else job
    doc = None if state is None else document(state, "s-1" if same else "s-2")
    actions = attended(job, doc, pods=pods)

    assert len(actions) <= 1
    live = doc is not None and state not in ("ended", "failed", "cancelled")
    ours = live and (same or status is None)
    if actions == [Release()]:
        assert held
        assert gone
        assert not pods
        assert not (ours and status is not None)
    if gone and held and not pods and not live:
        assert actions == [Release()]
    if gone:
        assert not {Submit(), Hold()}.intersection(a for a in actions if not isinstance(a, Tell))
    else:
        assert Cancel() not in actions
        assert Release() not in actions


def test_every_field_of_a_job_is_one_of_the_object():
    assert {"gpusMin", "gpusMax", "graceSeconds", "gpuTypes", "command"} <= FIELDS.keys()
