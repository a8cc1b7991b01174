"""The pod of an order."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.objects import example, order

from holdfast.errors import InvalidRequestError
from holdfast_services.operator.domain.names import FINALIZER
from holdfast_services.operator.domain.pods import escaped, pod_of


def test_the_pod_is_one_that_kubernetes_takes():
    pod = pod_of(order(environment={"A": "1"}, folder="/w", grace_s=12.5), "a", example())

    kubernetes_validate.validate(pod, desired_version="1.32", strict=True)


def test_it_runs_the_launcher_on_the_granted_node_alone():
    pod = pod_of(order(grace_s=12.5, folder="/w"), "node-a", example())
    (ranks,) = pod["spec"]["containers"]
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]

    assert ranks["command"] == [
        "holdfast", "run", "--ending", "/dev/termination-log", "--allocated",
        "--job", "default.gpt", "--nnodes", "1:4", "--nproc-per-node", "2", "--grace", "12.5",
        "train.py",
    ]  # fmt: skip
    assert term == {
        "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]
    }
    assert ranks["workingDir"] == "/w"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 23, "the launcher kills its ranks first"
    assert pod["metadata"]["labels"]["holdfast.dev/start"] == "7"


def test_the_pod_is_kept_until_its_end_is_told_and_goes_with_its_object():
    job = example()
    job["spec"]["template"]["spec"]["containers"][0]["args"] = ["of the image"]
    pod = pod_of(order(), "a", job)

    assert pod["metadata"]["finalizers"] == [FINALIZER]
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("HoldfastJob", "gpt", "u-1")
    assert "args" not in pod["spec"]["containers"][0]


def test_the_template_stays_as_it_is_otherwise():
    job = example()
    before = example()
    pod = pod_of(order(), "a", job)

    assert job == before, "the object is not changed"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    (ranks,) = pod["spec"]["containers"]
    assert ranks["resources"] == {"requests": {"cpu": "8", "memory": "64Gi"}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in ranks["volumeMounts"]


def test_what_the_template_says_of_defaults_counts_and_the_specs_environment_most():
    job = example()
    job["spec"]["template"]["spec"] |= {"hostNetwork": False, "dnsPolicy": "Default"}
    job["spec"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}, {"name": "A", "value": "template"},
    ]  # fmt: skip
    pod = pod_of(order(environment={"A": "spec"}), "a", job)
    variables = {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}

    assert (pod["spec"]["hostNetwork"], pod["spec"]["dnsPolicy"]) == (False, "Default")
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert variables["A"] == "spec"


def test_a_start_has_one_pod_of_one_name_on_each_node():
    def name(start, on):
        return pod_of(order(start), on, example())["metadata"]["name"]

    assert name(7, "a") == name(7, "a")
    assert len({name(7, "a"), name(8, "a"), name(7, "b")}) == 3
    assert re.fullmatch("gpt-7-[0-9a-f]{8}", name(7, "a"))


def test_a_template_without_a_container_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match=r"spec\.template\.spec\.containers is empty"):
        pod_of(order(), "a", example(template={"spec": {}}))


@pytest.mark.parametrize(
    ("template", "culprit"),
    [
        ("pod", "spec.template is no object"),
        (None, "spec.template is no object"),
        ({"spec": "ranks"}, "spec.template.spec is no object"),
        ({"metadata": ["x"]}, "spec.template.metadata is no object"),
        ({"metadata": {"labels": "x"}}, "spec.template.metadata.labels is no object"),
        ({"metadata": {"annotations": 5}}, "spec.template.metadata.annotations is no object"),
        ({"spec": {"affinity": 5}}, "spec.template.spec.affinity is no object"),
        ({"spec": {"tolerations": 5}}, "spec.template.spec.tolerations is no list"),
        ({"spec": {"volumes": "x"}}, "spec.template.spec.volumes is no list"),
        ({"spec": {"containers": {"a": 1}}}, "spec.template.spec.containers is no list"),
        ({"spec": {"containers": ["x"]}}, "spec.template.spec.containers[0] is no object"),
    ],
)
def test_a_template_that_is_no_pod_is_refused_by_name(template, culprit):
    with pytest.raises(InvalidRequestError, match=re.escape(culprit)):
        pod_of(order(), "a", example(template=template))


@pytest.mark.parametrize(
    ("container", "culprit"),
    [
        ({"volumeMounts": 5}, "volumeMounts is no list"),
        ({"env": {"A": "1"}}, "env is no list"),
        ({"env": [{"name": "A"}, {"value": "1"}]}, "env[1] is no object with a name"),
        ({"env": [{"name": ["A"]}]}, "env[0] is no object with a name"),
        ({"env": ["A"]}, "env[0] is no object with a name"),
    ],
)
def test_a_container_that_is_none_is_refused_by_name(container, culprit):
    template = {"spec": {"containers": [{"name": "ranks", "image": "x", **container}]}}
    with pytest.raises(InvalidRequestError, match=re.escape(f"containers[0].{culprit}")):
        pod_of(order(), "a", example(template=template))


def expanded(text, variables):
    """Do what a kubelet does with commands and values of variables."""
    made, at = "", 0
    while at < len(text):
        if text[at] == "$" and text[at + 1 : at + 2] == "$":
            made, at = made + "$", at + 2
        elif found := re.compile(r"\$\(([^)]*)\)").match(text, at):
            made, at = made + variables.get(found[1], found[0]), found.end()
        else:
            made, at = made + text[at], at + 1
    return made


@given(st.text(alphabet="$()Ax ", max_size=12))
def test_kubernetes_replaces_nothing_in_words_of_users(word):
    assert expanded(escaped(word), {"A": "replaced", "": "replaced"}) == word
