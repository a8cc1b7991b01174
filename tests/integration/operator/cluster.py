"""A cluster of Kubernetes: kmock or a real one for its API server, a kubelet for all its nodes.

The kubelet runs what pods say as processes, in the place of containers: it puts the folders of the
host where the pod wants them, keeps termination messages, and ends what is deleted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import kmock
from tests.unit.operator.objects import example, node

from holdfast_services.operator.domain.names import PLURAL
from holdfast_services.operator.domain.pods import AGENT_FOLDER, LAST_WORD

READ, WRITE = {"get", "list", "watch"}, {"create", "patch", "delete"}
KINDS = {
    "v1/nodes": ("Node", False, "node"),
    "v1/pods": ("Pod", True, "pod"),
    "v1/events": ("Event", True, "event"),
    "v1/namespaces": ("Namespace", False, "namespace"),  # kopf waits until there are such
    "apiextensions.k8s.io/v1/customresourcedefinitions": ("CRD", False, "crd"),
    f"holdfast.dev/v1alpha1/{PLURAL}": ("HoldfastJob", True, "holdfastjob"),
}
NOWHERE = "nowhere"
"""An image that cannot be pulled."""
CORE, OURS = "/api/v1", "/apis/holdfast.dev/v1alpha1"


class Objects:
    """The objects of an API server, over HTTP; ``_open`` opens a request."""

    def ask(self, method, path, body=None):
        """Return the answer; None: nothing is there."""
        try:
            with self._open(method, path, body) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404:
                    raise AssertionError(f"{method} {path}: {error.read().decode()}") from error
            return None

    def pods(self):
        return self.ask("GET", f"{CORE}/pods")["items"]

    def add_node(self, name="n", **what):
        self.ask("POST", f"{CORE}/nodes", node(name, **what))

    def add_job(self, name="job", **spec):
        job = example(**spec)
        job["metadata"] = {"name": name, "namespace": "default", "generation": 1}
        path = f"{OURS}/namespaces/default/{PLURAL}"
        self.ask("POST", path, job)
        return f"{path}/{name}"


class ApiServer(Objects):
    """kmock on a thread."""

    def __init__(self):
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self):
        async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
            for name, (kind, namespaced, singular) in KINDS.items():
                emulator.resources[name] = {
                    "kind": kind, "namespaced": namespaced, "singular": singular,
                    "verbs": READ | WRITE, "subresources": {"status"},
                }  # fmt: skip
            self.url = str(server.url).rstrip("/")
            self._up.set()
            await self._stop.wait()

    @property
    def environment(self):
        """What an operator needs to reach it."""
        return {"HOLDFAST_KUBERNETES": self.url}

    def _open(self, method, path, body):
        kind = "merge-patch+json" if method == "PATCH" else "json"
        request = urllib.request.Request(
            self.url + path, method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": f"application/{kind}"},
        )  # fmt: skip
        return urllib.request.urlopen(request, timeout=30)

    def bind(self, pod, node):
        self.ask("PATCH", path_of(pod), {"spec": {"nodeName": node}})

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


def api_server():
    """Return kmock, or a real one where there is one."""
    program = os.environ.get("HOLDFAST_TEST_KUBERNETES")
    if not program:
        return ApiServer()
    from tests.integration.operator.real_server import RealServer

    return RealServer(program)


class Kubelet:
    """Runs pods as processes, on the node that they ask for.

    Args:
        api: Where they are.
        folder: Where termination messages go.
        sockets: Those of agents by node, in the place of the one that pods are told.
        environ: What containers have besides.
    """

    def __init__(self, api, folder, sockets, environ):
        self.api, self.folder, self.sockets, self.environ = api, folder, sockets, environ
        self.processes = {}
        self.grace = {}
        self.evicted = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join(60)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def evict(self, name):
        """End a pod as a node does that is short of memory."""
        self.evicted.add(name)
        self.processes[name].kill()

    def _run(self):
        while not self._stop.wait(0.03):
            for pod in self.api.pods():
                self._sync(pod)

    def _sync(self, pod):
        name = pod["metadata"]["name"]
        deleted = pod["metadata"].get("deletionTimestamp")
        if pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            if deleted and pod["metadata"].get("deletionGracePeriodSeconds"):
                self.api.ask("DELETE", path_of(pod), {"gracePeriodSeconds": 0})
            return
        if pod["spec"]["containers"][0]["image"] == NOWHERE:
            self._pull_in_vain(pod, deleted)
            return
        if name not in self.processes:
            if not deleted:
                self.api.bind(pod, node_of(pod))
                self._start(pod)
            return
        process = self.processes[name]
        if process.poll() is not None:
            self._ended(pod, process.returncode)
        elif deleted and name not in self.grace:
            grace_s = pod["spec"]["terminationGracePeriodSeconds"]
            self.grace[name] = time.monotonic() + grace_s
            process.send_signal(signal.SIGTERM)
        elif deleted and time.monotonic() > self.grace[name]:
            process.kill()

    def _pull_in_vain(self, pod, deleted):
        if deleted:
            self._say(pod, "Failed", {"terminated": {"exitCode": 137}})
        elif "status" not in pod or not pod["spec"].get("nodeName"):
            self.api.bind(pod, node_of(pod))
            waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
            self._say(pod, "Pending", {"waiting": waiting})

    def _start(self, pod):
        (ranks,) = pod["spec"]["containers"]
        assert ranks["command"][0] == "holdfast"
        message = self.message(pod)
        message.touch()
        words = [str(message) if word == LAST_WORD else word for word in ranks["command"][1:]]
        mounted = {"HOLDFAST_AGENT": f"{AGENT_FOLDER}/agent.sock"}
        variables = {one["name"]: one["value"] for one in ranks["env"]}
        ours = {"HOLDFAST_AGENT": str(self.sockets[node_of(pod)]), **self.environ}
        assert variables.items() >= mounted.items()
        try:
            with (self.folder / f"{pod['metadata']['name']}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.cli.main", *words],
                    cwd=ranks["workingDir"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                    env={**os.environ, **variables, **ours},
                )  # fmt: skip
        except OSError as error:
            ended = {"exitCode": 128, "reason": "StartError", "message": f"chdir: {error.filename}"}
            self._say(pod, "Failed", {"terminated": ended})
            return
        self.processes[pod["metadata"]["name"]] = process
        self._say(pod, "Running", {"running": {}})

    def _ended(self, pod, code):
        code = 128 - code if code < 0 else code
        said = self.message(pod).read_text()
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": said}
        evicted = pod["metadata"]["name"] in self.evicted
        why = {"reason": "Evicted", "message": "low on memory"} if evicted else {}
        self._say(pod, "Failed" if code else "Succeeded", {"terminated": ended}, **why)

    def message(self, pod):
        return self.folder / f"{pod['metadata']['name']}.message"

    def _say(self, pod, phase, state, **why):
        containers = [
            {"name": "ranks", "state": state, "image": "x", "imageID": "x", "ready": True,
             "restartCount": 0}
        ]  # fmt: skip
        status = {"phase": phase, "containerStatuses": containers, **why}
        self.api.ask("PATCH", f"{path_of(pod)}/status", {"status": status})


def path_of(pod):
    """Return where a pod is."""
    metadata = pod["metadata"]
    return f"{CORE}/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def node_of(pod):
    """Return the node that a pod asks for."""
    required = pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (field,) = term["matchFields"]
    (node,) = field["values"]
    return node
