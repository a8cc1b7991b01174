"""The operator and what goes wrong around it, one turn after the other (ADR 0069).

API servers that refuse, cut and forget; pods that others make and take; two operators; templates
that are no pods.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from tests.integration.operator.cluster import OURS
from tests.integration.operator.mishaps import LOST, refusal, world
from tests.unit.operator.objects import node, order

from holdfast.core.executions import LEASE_S, REASON_LENGTH_MAX, Outcome
from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.operator.domain.names import FINALIZER, PLURAL, pod_name

NODE = "/api/v1/nodes/a"
PODS = "/api/v1/namespaces/default/pods"
POD = pod_name("default.gpt", 7, "a")
JOB = f"{OURS}/namespaces/default/{PLURAL}/gpt"
QUOTA = {"message": "Operation cannot be fulfilled on resourcequotas", "reason": "Conflict"}


@pytest.fixture
async def there():
    """A node, a job, and an order for a start of it."""
    async with world() as made:
        await made.add_node("a")
        await made.add_job()
        await made.orderer.order("a", 7, order(7))
        yield made


def launches(report):
    return {(one.job, one.start): one for one in report.launches}


def outcome(report, start=7):
    found = launches(report).get(("default.gpt", start))
    return found.outcome if found else None


# ------------------------------------------------------------------------------------ two operators


async def test_an_operator_that_another_has_followed_ends_and_begins_nothing(there):
    """The orders that it has heard are not its own any more: they are fenced by its lease."""
    first, second = there.operator(), there.operator()
    await first.hears()
    conversation = first.nodes._conversations["a"]
    there.orderer.leases["a"] = second.nodes._executor
    await there.orderer.order("a", 8, order(8))
    await second.hears()
    await second.nodes.turn()
    assert [one["metadata"]["name"] for one in await there.alive()] == [
        pod_name("default.gpt", 8, "a")
    ]

    await there.until(lambda: conversation.orders is None)
    await first.nodes.turn()
    assert [one["metadata"]["name"] for one in await there.alive()] == [
        pod_name("default.gpt", 8, "a")
    ]


async def test_an_operator_that_was_followed_while_it_looked_ends_nothing(there):
    first, second = there.operator(), there.operator()
    await first.hears()
    conversation = first.nodes._conversations["a"]

    async def followed():
        there.orderer.leases["a"] = second.nodes._executor
        await there.orderer.order("a", 8, order(8))
        await second.hears()
        await there.until(lambda: conversation.orders is None)

    there.front.faults.append(("GET", "/api/v1/pods", followed))
    await first.nodes.turn()
    assert [one["metadata"]["name"] for one in await there.alive()] == [
        pod_name("default.gpt", 8, "a")
    ]


async def test_orders_lapse_as_seen_by_who_gives_them(there):
    """From the question on: the answer may have been long on its way."""
    await there.orderer.order("a", 7, order(7), poll_s=60.0)
    there.orderer.thinks_s = 0.2
    operator = there.operator()
    await operator.hears()

    until_s = operator.nodes._conversations["a"]._until_s
    assert until_s <= there.orderer.asked_at_s[0] + LEASE_S


async def test_orders_that_have_lapsed_are_not_carried_out(there, monkeypatch):
    """Who has not heard the scheduler for as long as a lease does not know what was said since."""
    monkeypatch.setattr("holdfast_services.operator.conversation.LEASE_S", 1.0)
    operator = there.operator()
    await operator.hears()
    assert len(await there.alive()) == 1
    there.orderer.away = True
    await there.until(lambda: operator.nodes._conversations["a"].orders is None)
    await there.tear_out(POD)
    await operator.nodes.turn()
    assert not await there.alive()

    there.orderer.away = False
    await operator.hears()
    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.KILLED, "it goes on")


# ------------------------------------------------------------------------------- the API server


@pytest.mark.parametrize("status", [409, 429, 401])
async def test_what_is_not_carried_out_is_neither_told_as_such_nor_given_up(there, status):
    """A quota that two write at once is answered with 409, and an overload with 429."""
    there.front.faults.append(("POST", PODS, status, QUOTA))
    operator = there.operator()
    await operator.hears(2)
    await there.orderer.heard("a", lambda r: not r.launches and not r.applied, "it is not there")

    there.front.faults.clear()
    await operator.nodes.turn()
    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.RUNNING, "it is made")


async def test_what_was_made_though_its_answer_was_lost_is_not_made_twice(there):
    there.front.faults.append(("POST", PODS, LOST))
    operator = there.operator()
    await operator.hears()
    there.front.faults.clear()
    await operator.nodes.turn()

    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.RUNNING, "it is told")
    assert there.made() == [PODS]


async def test_what_was_made_after_pods_were_listed_is_found(there):
    """What an operator asked for as it was killed may be done after the next one has looked."""
    operator = there.operator()
    there.front.faults.append(("GET", "/api/v1/pods", 200, {"items": []}))
    await operator.hears()
    assert len(await there.alive()) == 1
    await there.operator().nodes.turn()
    await operator.nodes.turn()

    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.RUNNING, "it is found")
    assert there.orderer.reports["a"].applied == 7


async def test_a_refusal_of_any_length_does_not_silence_its_node(there):
    """The scheduler takes no report with such a reason: the node would count as lost."""
    said = {"message": "Invalid value: " + "\0" * 50_000 + " must be no more than 63 characters"}
    there.front.faults.append(("POST", PODS, 422, said))
    operator = there.operator()
    await operator.hears()
    await there.orderer.heard("a", lambda r: r.applied == 7, "it is told")

    found = launches(there.orderer.reports["a"])["default.gpt", 7]
    assert found.outcome is Outcome.REFUSED
    assert len(found.reason) <= REASON_LENGTH_MAX
    assert "Invalid value" in found.reason
    await there.orderer.order("a", 8)
    await operator.hears()
    await there.orderer.heard("a", lambda r: not r.launches, "nobody asks for it any more")


async def test_what_a_quota_refuses_is_nobodys_fault(there):
    there.front.faults.append(("POST", PODS, 403, {"message": "exceeded quota: pods"}))
    await there.operator().hears()
    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.KILLED, "it is told")

    found = launches(there.orderer.reports["a"])["default.gpt", 7]
    assert found.reason == "no pod may be made: Kubernetes: exceeded quota: pods"


async def test_a_token_that_has_changed_is_read_again(there):
    """A connection is kept as long as the account is the same."""
    operator = there.operator()
    await operator.nodes.turn()
    before = operator.kubernetes._session
    there.front.faults.append(("GET", "/api/v1/nodes", 401))
    with pytest.raises(UnavailableError):
        await operator.nodes.turn()
    assert operator.kubernetes._session is before
    there.front.token = there.token = "new"
    there.front.faults.clear()
    await operator.nodes.turn()

    assert operator.kubernetes._session is not before


async def test_a_long_list_is_read_to_its_end(there):
    there.front.faults += [
        ("GET", "continue=more", 200, {"items": [node("c")]}),
        ("GET", "/api/v1/nodes", 200, {"items": [node("b")], "metadata": {"continue": "more"}}),
    ]
    operator = there.operator()
    await operator.nodes.turn()

    assert operator.nodes._conversations.keys() == {"b", "c"}


async def test_a_server_below_a_path_is_asked_below_it(there):
    there.url += "/clusters/x/"
    with contextlib.suppress(CheckpointError):
        await there.operator().nodes.turn()

    assert there.front.asked
    assert all(path.startswith("/clusters/x/api/v1/") for _, path, _ in there.front.asked)


# ------------------------------------------------------------------------- pods, and others' hands


async def test_a_script_cannot_say_that_its_launcher_runs_on(there):
    """It may write the termination message; its pod would be kept for ever."""
    operator = there.operator()
    await operator.hears()
    ended = {"exitCode": 0, "message": '{"outcome": "running"}'}
    containers = [{"name": "ranks", "state": {"terminated": ended}}]
    await there.say(POD, phase="Succeeded", containerStatuses=containers)
    await operator.nodes.turn()

    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.KILLED, "it has ended")


async def test_a_name_that_somebody_elses_pod_has_is_a_refusal(there):
    pod = {"metadata": {"name": POD, "namespace": "default"}, "spec": {"containers": []}}
    await there.ask("POST", PODS, pod)
    await there.operator().hears()

    await there.orderer.heard("a", lambda r: r.applied == 7, "it is told")
    found = launches(there.orderer.reports["a"])["default.gpt", 7]
    assert found.outcome is Outcome.REFUSED
    assert f"pod default/{POD} is there" in found.reason


async def test_a_pod_that_was_torn_out_is_told_as_killed_and_not_made_again(there):
    """By hand, with its finalizer: it may run still, and a second would be one too many."""
    operator = there.operator()
    await operator.hears()
    await there.tear_out(POD)
    await operator.nodes.turn()
    await operator.nodes.turn()

    await there.orderer.heard("a", lambda r: outcome(r) is Outcome.KILLED, "it is told")
    assert not await there.alive()


async def test_a_copy_of_a_pod_is_not_taken_for_it(there):
    operator = there.operator()
    await operator.hears()
    (pod,) = await there.alive()
    metadata = {**pod["metadata"], "name": "zz-copy", "finalizers": []}
    status = {"phase": "Failed", "reason": "Evicted"}
    await there.ask("POST", PODS, {**pod, "metadata": metadata, "status": status})
    await operator.nodes.turn()
    await there.orderer.order("a", 8, order(7))
    await operator.hears()
    await there.orderer.heard("a", lambda r: r.applied == 8, "it is told")

    assert outcome(there.orderer.reports["a"]) is Outcome.RUNNING
    await there.ask("DELETE", JOB)
    there.orderer.jobs["default.gpt"] = {"state": "ended", "id": "s-1"}
    assert await operator.jobs._used() == {("default", "gpt")}
    await there.tear_out(POD)
    assert await operator.jobs._used() == set()


async def test_what_is_not_asked_for_any_more_goes_and_others_keep_what_they_hold(there):
    """With the version that was read, so that no finalizer is lost that is added meanwhile."""
    operator = there.operator()
    await operator.hears()
    held = {"finalizers": [FINALIZER, "another.one/x"], "resourceVersion": "41"}
    await there.ask("PATCH", f"{PODS}/{POD}", {"metadata": held})
    await there.say(POD, phase="Failed", reason="Evicted")
    await there.orderer.order("a", 8)
    await operator.hears()
    await there.orderer.heard("a", lambda r: r.applied == 8 and not r.launches, "it is forgotten")

    change = {"finalizers": ["another.one/x"], "resourceVersion": "41"}
    patches = [json.loads(body) for method, _, body in there.front.asked if method == "PATCH"]
    assert {"metadata": change} in patches
    assert (await there.ask("GET", f"{PODS}/{POD}"))["metadata"]["deletionTimestamp"]


async def test_what_can_never_begin_is_ended_with_the_reason(there):
    operator = there.operator()
    await operator.hears()
    waiting = {"reason": "InvalidImageName", "message": "no"}
    containers = [{"name": "ranks", "state": {"waiting": waiting}}]
    await there.say(POD, phase="Pending", containerStatuses=containers)
    await operator.nodes.turn()

    metadata = (await there.ask("GET", f"{PODS}/{POD}"))["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["annotations"]["holdfast.dev/refused"] == (
        "container ranks: InvalidImageName: no"
    )


async def test_a_pod_that_goes_before_it_is_ended_has_ended(there):
    operator = there.operator()
    await operator.hears()
    await there.orderer.order("a", 8)
    there.front.faults.append(("DELETE", PODS, 404))
    await operator.hears()

    await there.orderer.heard("a", lambda r: r.applied == 8, "it is carried out")


async def test_nobody_speaks_for_a_node_that_is_not_ready_or_is_not_offered(there):
    """But for one that is not offered any more somebody does, until its pods have gone."""
    await there.add_node("b", labels={})
    operator = there.operator()
    await operator.hears()
    assert operator.nodes._conversations.keys() == {"a"}
    await there.ask("PATCH", NODE, {"metadata": {"labels": None}})
    await operator.nodes.turn()
    await there.orderer.heard("a", lambda r: "label" in r.leaving, "it is about to go")

    unready = [{"type": "Ready", "status": "Unknown"}]
    await there.ask("PATCH", f"{NODE}/status", {"status": {"conditions": unready}})
    await operator.nodes.turn()
    assert not operator.nodes._conversations


# --------------------------------------------------------------------------------------------- jobs


async def test_a_status_says_what_is_and_is_written_when_it_changes(there):
    await there.ask("PATCH", JOB, {"metadata": {"resourceVersion": "9", "finalizers": ["x/y"]}})
    operator = there.operator()
    await operator.jobs.turn()
    hold = {"finalizers": ["x/y", FINALIZER], "resourceVersion": "9"}
    assert json.loads(there.front.asked[-1][2]) == {"metadata": hold}
    await operator.jobs.turn()
    document = there.orderer.jobs["default.gpt"]
    for change in (
        {"state": "running", "gpus": 3, "nodes": {"a": 2, "b": 1}, "message": "begins"},
        {"gpus": 2, "nodes": {"a": 2}, "message": ""},
    ):
        document.update(change)
        await operator.jobs.turn()
    status = (await there.ask("GET", JOB))["status"]
    assert status["nodes"] == {"a": 2}
    assert not status.get("message")

    there.front.asked.clear()
    await operator.jobs.turn()
    assert [method for method, _, _ in there.front.asked] == ["GET"]
    events = (await there.ask("GET", "/api/v1/events"))["items"]
    assert [one["reason"] for one in events] == ["Queued", "Running"]


async def test_a_template_that_is_no_pod_concerns_its_job_alone(there):
    """Who may create a HoldfastJob must not be able to stop those of others."""
    bad = await there.add_job("a-bad", template={"spec": {"containers": [None]}})
    await there.orderer.order("a", 8, order(7), order(8, job="default.a-bad"))
    operator = there.operator()
    await operator.jobs.turn()
    await operator.hears()
    await there.orderer.heard("a", lambda r: r.applied == 8, "its orders are carried out")

    found = (await there.ask("GET", bad))["status"]
    assert (found["state"], found["why"]) == (
        "refused", "spec.template.spec.containers[0] is no object"
    )  # fmt: skip
    assert there.orderer.submitted == ["default.gpt"]
    report = there.orderer.reports["a"]
    assert outcome(report) is Outcome.RUNNING
    assert launches(report)["default.a-bad", 8].outcome is Outcome.REFUSED


async def test_an_object_that_cannot_be_changed_keeps_no_other_waiting(there):
    """A webhook of one namespace that is away is answered with 500."""
    await there.add_job("later", "z")
    there.front.faults.append(("PATCH", "/namespaces/default/", 500))
    with pytest.raises(UnavailableError):
        await there.operator().jobs.turn()

    assert there.orderer.submitted == ["default.gpt", "z.later"]


async def test_a_job_that_cannot_be_noted_is_submitted_once(there):
    """Nor a second time when it is over."""
    there.front.faults.append(("PATCH", "/status", 422))
    operator = there.operator()
    await operator.jobs.turn()
    there.orderer.jobs["default.gpt"]["state"] = "ended"
    await operator.jobs.turn()
    await operator.jobs.turn()
    assert there.orderer.submitted == ["default.gpt"]

    there.front.faults.clear()
    await operator.jobs.turn()
    assert (await there.ask("GET", JOB))["status"]["state"] == "ended"


async def test_a_job_that_waited_and_was_taken_on_unnoted_is_cancelled_with_its_object(there):
    """It would train on, governed by nobody, or keep its object for ever."""
    there.orderer.refused = refusal("exhausted", "wants 16 GPUs, all nodes have 8")
    operator = there.operator()
    await operator.jobs.turn()
    assert (await there.ask("GET", JOB))["status"]["state"] == "waiting"
    there.front.asked.clear()
    await operator.jobs.turn()
    assert [method for method, _, _ in there.front.asked] == ["GET"], "told once"
    there.orderer.refused = None
    there.front.faults.append(("PATCH", "/status", 500))
    with pytest.raises(UnavailableError):
        await operator.jobs.turn()
    assert there.orderer.submitted == ["default.gpt"]

    there.front.faults.clear()
    await there.ask("DELETE", JOB)
    await there.operator().jobs.turn()
    assert there.orderer.cancelled == ["default.gpt"]
