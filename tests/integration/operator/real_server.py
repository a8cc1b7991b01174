"""A real API server of Kubernetes over a real etcd, with our CRD and our rules for the operator.

Where its program is says ``HOLDFAST_TEST_KUBERNETES``; ``make test-kubernetes`` builds it. There is
no scheduler, and no kubelet but that of ``cluster``.
"""

from __future__ import annotations

import json
import secrets
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import yaml
from tests.e2e.stack import until
from tests.integration.operator.cluster import CORE, OURS, Objects
from tests.servers.processes import free_port
from tests.unit.operator.objects import manifests

RIGHTS = "/apis/rbac.authorization.k8s.io/v1"
READY_S_MAX = 120.0


class RealServer(Objects):
    """etcd and kube-apiserver; the operator is a user with the rights of ``rbac.yaml`` alone."""

    def __init__(self, program):
        self.folder = Path(tempfile.mkdtemp(prefix="hf-kube-"))
        self.admin, self.operator = secrets.token_hex(16), secrets.token_hex(16)
        self.processes = []
        store, port = f"http://127.0.0.1:{free_port()}", free_port()
        self.url = f"https://127.0.0.1:{port}"
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._start_etcd(store)
        self._start_api_server(program, store, port)
        until(self._is_ready, "the API server is ready", READY_S_MAX)
        self._prepare()

    def _start_etcd(self, url):
        peer = f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", url, "--advertise-client-urls", url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}",
        )  # fmt: skip

    def _start_api_server(self, program, store, port):
        (self.folder / "tokens.csv").write_text(
            f'{self.admin},admin,1,"system:masters"\n{self.operator},operator,2\n'
        )
        key = self.folder / "key.pem"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self._start(
            program, "--etcd-servers", store, "--secure-port", str(port),
            "--bind-address", "127.0.0.1", "--cert-dir", str(self.folder / "certs"),
            "--token-auth-file", str(self.folder / "tokens.csv"), "--authorization-mode", "RBAC",
            "--service-account-issuer", "https://test", "--service-account-key-file", str(key),
            "--service-account-signing-key-file", str(key),
            "--service-cluster-ip-range", "10.0.0.0/24",
            "--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition",
        )  # fmt: skip

    def _start(self, program, *words):
        log = (self.folder / f"{Path(program).name}.log").open("ab")
        with log:
            self.processes.append(
                subprocess.Popen(
                    [program, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )

    def _is_ready(self):
        assert all(process.poll() is None for process in self.processes), self.said()
        try:
            with self._open("GET", "/readyz", None) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _prepare(self):
        self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                 manifests("crd")[0])  # fmt: skip
        until(lambda: self.ask("GET", f"{OURS}/holdfastjobs"), "HoldfastJobs are known")
        (role,) = (one for one in manifests("rbac") if one["kind"] == "ClusterRole")
        self.ask("POST", f"{RIGHTS}/clusterroles", role)
        self.ask("POST", f"{RIGHTS}/clusterrolebindings", {
            "metadata": {"name": "operator"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                        "name": role["metadata"]["name"]},
            "subjects": [{"kind": "User", "name": "operator"}],
        })  # fmt: skip
        runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
        self.ask("POST", "/apis/node.k8s.io/v1/runtimeclasses", runtime)
        until(lambda: self.ask("GET", f"{CORE}/namespaces/default"), "there is a namespace")

    @property
    def environment(self):
        """What an operator needs to reach it."""
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {
                "server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": self.operator}}],
        }  # fmt: skip
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return {"KUBECONFIG": str(path)}

    def _open(self, method, path, body):
        kind = "merge-patch+json" if method == "PATCH" else "json"
        request = urllib.request.Request(
            self.url + path, method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": f"application/{kind}",
                     "Authorization": f"Bearer {self.admin}"},
        )  # fmt: skip
        return urllib.request.urlopen(request, timeout=30, context=self._tls)

    def bind(self, pod, node):
        metadata = pod["metadata"]
        path = f"{CORE}/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        self.ask("POST", path, {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        })  # fmt: skip

    def said(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in logs)

    def close(self):
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
