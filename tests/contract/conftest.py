"""The object stores of the suites; each test has a folder of its own in them."""

from __future__ import annotations

import os

import pytest
from tests.contract.stores import LENGTH, PAGE_COUNT, Kind
from tests.servers.redis import running_redis

from holdfast.core.retry import Waits
from holdfast.objectstore import open_store
from holdfast.objectstore.s3 import S3Store
from holdfast.objectstore.s3.client import Patience
from holdfast.objectstore.s3.location import parse_location

IMPATIENT = Patience(waits=Waits(first_s=0.01, wait_s_max=2.0, tries_max=3))


@pytest.fixture(params=["directory", "memory", "moto", "ceph"])
def kind(request, tmp_path):
    name = request.param
    if name == "memory":
        store = again = open_store("memory:")
    elif name == "directory":
        store = open_store(f"file://{tmp_path}/store", make=True)
        again = open_store(store.url)
    else:
        url = request.getfixturevalue(name).corner("pre fix/")
        options = {"patience": IMPATIENT, "page_count_max": PAGE_COUNT}
        store = S3Store(parse_location(url), **options)
        again = S3Store(parse_location(store.url), **options)
    yield Kind(name, store, again)
    store.close()
    again.close()


@pytest.fixture
def store(kind):
    return kind.store


@pytest.fixture(scope="module")
def data():
    return os.urandom(LENGTH)


@pytest.fixture(scope="module")
def redis_server():
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server):
    redis_server.ask("FLUSHALL")
    return redis_server.url
