"""Manifests are what Kubernetes takes, and say what the operator does."""

from __future__ import annotations

import jsonschema
import kubernetes_validate
import pytest
from tests.unit.operator.objects import MANIFESTS, example, manifests
from tests.unit.operator.test_attending import NOW, document

from holdfast.core.job_spec import GPUS_MAX, PRIORITY_MAX, RETRIES_MAX
from holdfast_services.operator.domain.attending import refused_status, status_of
from holdfast_services.operator.domain.job_specs import FIELDS
from holdfast_services.operator.domain.names import GROUP, KIND, PLURAL, VERSION
from holdfast_services.operator.domain.pods import AGENT_FOLDER, NODE_FOLDER

FILES = sorted(path.stem for path in MANIFESTS.glob("*.yaml") if path.stem != "example")


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_is_valid_to_the_letter(name):
    for one in manifests(name):
        kubernetes_validate.validate(one, desired_version="1.32", strict=True)


def schema():
    (crd,) = manifests("crd")
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def check(job):
    whole = schema()
    jsonschema.validate(job, {**whole, "properties": {**whole["properties"]}})


def test_the_example_is_what_the_crd_asks_for():
    check(example())
    for bad in ({"gpusMin": 0}, {"command": []}, {"priority": 1000}, {"environment": {"A": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            check(example(**bad))


def test_the_crd_has_the_fields_of_a_job_and_their_bounds():
    spec = schema()["properties"]["spec"]["properties"]

    assert spec.keys() == {*FIELDS, "template"}
    assert spec["gpusMax"]["maximum"] == GPUS_MAX
    assert (spec["priority"]["minimum"], spec["priority"]["maximum"]) == (
        -PRIORITY_MAX, PRIORITY_MAX,
    )  # fmt: skip
    assert spec["retries"]["maximum"] == RETRIES_MAX


def test_the_crd_has_the_fields_of_the_status():
    """What a schema lacks Kubernetes throws away, and the operator would write it for ever."""
    properties = schema()["properties"]["status"]["properties"]
    statuses = [
        status_of(example(), document(message="m"), NOW),
        refused_status(example(), "why", NOW, final=True),
    ]

    assert properties.keys() == {key for status in statuses for key in status}
    for status in statuses:
        check({**example(), "status": status})


def test_manifests_and_code_mean_the_same():
    (crd,) = manifests("crd")
    names = crd["spec"]["names"]
    assert (crd["spec"]["group"], names["kind"], names["plural"]) == (GROUP, KIND, PLURAL)
    assert crd["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert crd["spec"]["versions"][0]["name"] == VERSION
    (agent,) = manifests("agent")
    pod = agent["spec"]["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if "hostPath" in one)
    assert volume["hostPath"]["path"] == NODE_FOLDER
    (container,) = pod["containers"]
    assert {"name": volume["name"], "mountPath": AGENT_FOLDER} in container["volumeMounts"]
    (uid,) = {container["securityContext"]["runAsUser"],
              example()["spec"]["template"]["spec"]["securityContext"]["runAsUser"]}  # fmt: skip
    assert uid == 1000


@pytest.mark.parametrize("name", ["agent", "operator", "services"])
def test_whatever_speaks_over_the_network_shows_a_certificate(name):
    """Each pod that is made by a manifest has the secret where the setting says."""
    pods = [one["spec"]["template"]["spec"] for one in manifests(name) if "template" in one["spec"]]
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        settings = {each["name"]: each.get("value", "") for each in container["env"]}
        (volume,) = (one for one in pod["volumes"] if "secret" in one)
        assert "holdfast-tls" == volume["secret"]["secretName"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert settings["HOLDFAST_TLS"] == mounts[volume["name"]]
        assert "HOLDFAST_INSECURE" not in settings
        assert "httpGet" not in container.get("readinessProbe", {}), "a kubelet shows none"
        assert "http:" not in settings.get("HOLDFAST_SCHEDULER", "")
