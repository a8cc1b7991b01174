"""Fixtures of servers: one of each for the session, started when a test first asks for it.

A keeper has them, for all workers of the session. A test asks for ``ceph`` or ``moto`` (their
credentials are in its environment then) or for ``postgres_url``. With
``HOLDFAST_TEST_S3=<endpoint>`` what asks for ``ceph`` runs against that server instead, with the
credentials of the environment; its buckets are deleted afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import keeper
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.s3 import KEYS, S3Server

KEEPER = pytest.StashKey[keeper.Keeper]()
Ask = Callable[[str], dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    """Have a keeper at hand, in the process that the user started."""
    if not hasattr(config, "workerinput"):
        config.stash[KEEPER] = keeper.Keeper()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the keeper listens."""
    node.workerinput["keeper"] = str(node.config.stash[KEEPER].start())


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers."""
    if KEEPER in config.stash:
        config.stash[KEEPER].end()


@pytest.fixture(scope="session")
def ask_keeper(pytestconfig: pytest.Config) -> Ask:
    """Return a function that starts a server by name, once, and returns how to use it."""

    def ask(name: str) -> dict[str, Any]:
        given = getattr(pytestconfig, "workerinput", {}).get("keeper")
        return keeper.ask(Path(given) if given else pytestconfig.stash[KEEPER].start(), name)

    return ask


@pytest.fixture(scope="session")
def external_s3_keys() -> dict[str, str]:
    """The credentials that the tests were started with."""
    return {key: os.environ[key] for key in KEYS if key in os.environ}


@pytest.fixture(scope="session")
def ceph_server(external_s3_keys: dict[str, str], ask_keeper: Ask) -> Iterator[S3Server]:
    """A server; what uses it in this process asks for ``ceph``."""
    endpoint = os.environ.get("HOLDFAST_TEST_S3")
    if endpoint:
        server = S3Server(endpoint, external_s3_keys)
        yield server
        server.clear()
    else:
        yield S3Server(**ask_keeper("ceph"))


@pytest.fixture(scope="session")
def moto_server(ask_keeper: Ask) -> S3Server:
    """A server; what uses it in this process asks for ``moto``."""
    return S3Server(**ask_keeper("moto"))


@pytest.fixture
def postgres_url(ask_keeper: Ask) -> Iterator[str]:
    """A database of its own for each test."""
    kept = ask_keeper("postgres")
    server = PostgresServer(Path(kept["binaries"]), Path(kept["folder"]))
    name = server.create()
    yield server.url(name)
    server.drop(name)


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
