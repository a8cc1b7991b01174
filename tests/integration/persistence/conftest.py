"""A catalogue, a node and a directory store for each test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.integration.persistence.harness import Catalogue, Holder

from holdfast.objectstore import open_store
from holdfast_services.persistence import worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """The same worker with shorter rests: tests wait for many of them."""
    monkeypatch.setattr(worker, "CLAIM_WAIT_S", 0.05)
    short = replace(worker.ITEM_WAITS, first_s=0.1)
    monkeypatch.setattr(worker, "ITEM_WAITS", short)
    monkeypatch.setattr(worker, "QUEUE_WAITS", replace(short, first_s=0.05))


@pytest.fixture
def catalogue():
    made = Catalogue()
    yield made
    made.stop()


@pytest.fixture
def arena(tmp_path):
    folder = tmp_path / "arena"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def node(arena):
    """A node on this machine: its segments are files that can be mapped."""
    made = Holder("near", arena)
    yield made
    made.close()


@pytest.fixture
def far():
    """A node whose files are not here."""
    made = Holder("far")
    yield made
    made.close()


@pytest.fixture
def store_url(tmp_path):
    return (tmp_path / "store").as_uri()


@pytest.fixture
def store(store_url):
    made = open_store(store_url, make=True)
    yield made
    made.close()


@pytest.fixture
def queue_url(tmp_path):
    return f"sqlite:///{tmp_path / 'queue.db'}"
