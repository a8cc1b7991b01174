"""What pods say of their launchers (F105): words that were left, evictions, what cannot begin."""

from __future__ import annotations

import json

import pytest
from tests.unit.operator.objects import deleted, pod

from holdfast.core.executions import ExecutorReport, LastWord, Outcome, check
from holdfast.core.records import to_record
from holdfast.launcher import ending
from holdfast_services.operator.domain.launchers import launcher_of
from holdfast_services.operator.domain.names import pod_name


def state(one):
    found = launcher_of(one)
    check(ExecutorReport(executor="0" * 32, sequence=1, gpus=1, launches=(found.state,)))
    return found.state


def test_a_pod_is_the_launcher_of_a_start_on_a_node():
    found = launcher_of(pod(7, "a"))

    assert found.place == ("a", "default.gpt", 7)
    assert (found.alive, found.stopping, found.hopeless) == (True, False, "")


def test_pods_of_others_are_none_of_ours():
    for key, value in (
        ("app.kubernetes.io/managed-by", "helm"),
        ("holdfast.dev/start", "x"),
        ("holdfast.dev/start", "9" * 99),
        ("holdfast.dev/job", ""),
        ("holdfast.dev/job", "a/b"),
    ):
        other = pod()
        other["metadata"]["labels"][key] = value
        if value.isdecimal():  # the scheduler takes no such number
            other["metadata"]["name"] = pod_name("default.gpt", int(value), "a")
        assert launcher_of(other) is None, (key, value)
    copy = pod()
    copy["metadata"]["name"] = "copy"
    assert launcher_of(copy) is None
    bare = {"metadata": {"name": "x", "namespace": "default"}}
    assert launcher_of(bare) is None


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.RUNNING])
def test_the_word_that_a_launcher_left_is_how_it_ended(outcome):
    word = LastWord(outcome=outcome, code=3, reason="ValueError: bad batch")
    terminated = {"exitCode": 3, "message": json.dumps(to_record(word))}
    said = state(pod(phase="Failed", terminated=terminated))

    assert (said.outcome, said.code, said.reason) == (outcome, 3, "ValueError: bad batch")


def test_a_word_is_short_enough_for_kubernetes_and_ends_as_the_reason_does(tmp_path):
    """Kubernetes keeps 4 KiB: cut by it the word would say nothing."""
    there = tmp_path / "termination-log"
    there.touch()
    node = there.stat().st_ino
    for reason in ("ü" * 4000 + "end", "\U0001f600" * 3000 + "end", "x" * 9000 + "end"):
        ending.write(there, LastWord(outcome=Outcome.FAILED, code=1, reason=reason))

        assert there.stat().st_ino == node, "it is mounted: it cannot be replaced"
        assert len(there.read_bytes()) <= 4096
        word = ending.read(there)
        assert word.outcome is Outcome.FAILED
        assert word.reason.endswith("end")


@pytest.mark.parametrize(
    "terminated",
    [
        {"exitCode": 1, "message": '{"outcome": "failed", "code": 100000}'},
        {"exitCode": 1, "message": '{"outcome": "failed", "reason": "\\ud800"}'},
        {"exitCode": 1, "message": '{"outcome": "running"}'},
        {"exitCode": 1, "message": "[" * 4000},
        {"exitCode": 1, "message": "\0" * 4000},
    ],
)
def test_what_a_script_writes_in_the_place_of_a_word_silences_no_node(terminated):
    """A report that the scheduler does not take would be a node that is lost."""
    said = state(pod(phase="Failed", terminated=terminated))

    assert said.outcome in (Outcome.FAILED, Outcome.KILLED)
    assert said.reason.encode() is not None


def test_exit_143_without_a_word_is_no_failure_of_the_script():
    terminated = {"exitCode": 143, "reason": "Error", "message": "the end of a log"}
    said = state(pod(phase="Failed", terminated=terminated))

    assert said.outcome is Outcome.KILLED
    assert said.reason == "its launcher has ended with Error, exit code 143: the end of a log"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Evicted", "The node was low on resource: memory."),
        ("UnexpectedAdmissionError", "Allocate failed"),
        ("OutOfcpu", "Node didn't have enough resource: cpu"),
        ("Preempting", "Preempted in order to admit critical pod"),
    ],
)
def test_evictions_and_refusals_of_a_node_are_no_failures_of_the_script(reason, message):
    never = pod(phase="Failed", reason=reason, message=message)
    never["status"]["containerStatuses"] = []
    said = state(never)

    assert said.outcome is Outcome.KILLED
    assert f"{reason}: {message}" in said.reason
    ran = {"exitCode": 137, "reason": "OOMKilled"}
    assert state(pod(phase="Failed", terminated=ran, reason=reason)).outcome is Outcome.KILLED


def test_the_reason_of_a_disruption_is_told():
    conditions = [{"type": "DisruptionTarget", "status": "True", "message": "taint manager"}]
    said = state(pod(terminated={"exitCode": 137}, phase="Failed", conditions=conditions))

    assert "taint manager" in said.reason


def test_a_program_or_an_option_that_is_not_there_is_refused():
    """Tried twice it is a failure that the user hears of, and not a job that waits for ever."""
    missing = {"exitCode": 128, "reason": "StartError", "message": "exec: holdfast: not found"}
    assert state(pod(phase="Failed", terminated=missing)).outcome is Outcome.REFUSED
    usage = {"exitCode": 2, "reason": "Error", "message": "unrecognized arguments: --autoo"}
    said = state(pod(phase="Failed", terminated=usage))

    assert said.outcome is Outcome.REFUSED
    assert "--autoo" in said.reason


@pytest.mark.parametrize(
    "reason", ["ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"]
)
def test_what_can_never_begin_is_known_for_it(reason):
    waiting = {"reason": reason, "message": "no such image: gpt:latst"}
    found = launcher_of(pod(phase="Pending", waiting=waiting))

    assert found.alive, "until its pod has ended it may begin all the same"
    assert found.hopeless == f"container ranks: {reason}: no such image: gpt:latst"


def test_what_was_ended_since_it_could_not_begin_is_refused_with_the_reason():
    one = deleted(pod(phase="Failed", terminated={"exitCode": 137}))
    one["metadata"]["annotations"]["holdfast.dev/refused"] = "container ranks: InvalidImageName"
    said = state(one)

    assert (said.outcome, said.reason) == (Outcome.REFUSED, "container ranks: InvalidImageName")


def test_a_pod_that_is_deleted_before_a_node_has_it_has_ended():
    one = deleted(pod(phase="Pending"))
    assert state(one).outcome is Outcome.RUNNING, "its node has it, and says when it has ended"
    del one["spec"]["nodeName"]
    one["status"] = {"phase": "Pending"}
    assert state(one).outcome is Outcome.KILLED


def test_for_what_a_pod_waits_is_told():
    conditions = [{"type": "PodScheduled", "status": "False", "message": "Insufficient cpu"}]
    said = state(pod(phase="Pending", waiting={"reason": "x"}, conditions=conditions))

    assert (said.outcome, said.reason) == (Outcome.RUNNING, "its pod waits: Insufficient cpu")


def test_other_containers_do_not_keep_a_launcher_alive():
    one = pod(terminated={"exitCode": 0, "message": json.dumps({"outcome": "ended"})})
    one["status"]["containerStatuses"].append({"name": "mesh", "state": {"running": {}}})

    assert state(one).outcome is Outcome.ENDED
