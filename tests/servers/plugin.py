"""Fixtures of servers: one of each for the session, started when a test first asks for it.

A test asks for ``ceph`` or ``moto`` (their credentials are in its environment then). With
``HOLDFAST_TEST_S3=<endpoint>`` what asks for ``ceph`` runs against that server instead, with the
credentials of the environment; its buckets are deleted afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from tests.servers.ceph import running_ceph
from tests.servers.moto import running_moto
from tests.servers.proxy import FaultProxy
from tests.servers.s3 import KEYS, S3Server


@pytest.fixture(scope="session")
def external_s3_keys() -> dict[str, str]:
    """The credentials that the tests were started with."""
    return {key: os.environ[key] for key in KEYS if key in os.environ}


@pytest.fixture(scope="session")
def ceph_server(external_s3_keys: dict[str, str]) -> Iterator[S3Server]:
    """A server; what uses it in this process asks for ``ceph``."""
    endpoint = os.environ.get("HOLDFAST_TEST_S3")
    if endpoint:
        server = S3Server(endpoint, external_s3_keys)
        yield server
        server.clear()
    else:
        with running_ceph() as server:
            yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """A server; what uses it in this process asks for ``moto``."""
    with running_moto() as server:
        yield server


@pytest.fixture
def ceph(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Ceph, and the credentials to get in."""
    return _enter(ceph_server, monkeypatch)


@pytest.fixture
def moto(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Moto, and credentials, which it does not ask for."""
    return _enter(moto_server, monkeypatch)


def _enter(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def fault_proxy() -> Iterator[Callable[[str], FaultProxy]]:
    """Return a function that puts a proxy with faults in front of an endpoint."""
    proxies: list[FaultProxy] = []

    def start(endpoint: str, **options: object) -> FaultProxy:
        proxies.append(FaultProxy(endpoint, **options))  # type: ignore[arg-type]
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()
