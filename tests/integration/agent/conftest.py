"""Real agents: processes, sockets, tmpfs; the catalogue is a small servicer in the test."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest

from holdfast.objectstore.directory import DirectoryStore

from .harness import (
    RUN,
    Catalogue,
    Node,
    Trainer,
    bytes_of,
    open_session,
    reported,
    reserve,
    until,
    upload,
)

MIB = 1 << 20


@pytest.fixture
def shm():
    """A folder on tmpfs with a short name, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="hf", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def catalogue():
    """A metadata service whose answers the test writes."""
    service = Catalogue()
    yield service
    service.stop()


@pytest.fixture
def node(shm, catalogue):
    """Start agents by name; all are killed at the end."""
    nodes: list[Node] = []

    def start(name: str = "a", **environ: str) -> Node:
        made = Node(name, shm / name, catalogue.address, environ)
        made.start()
        nodes.append(made)
        return made

    yield start
    for made in nodes:
        made.kill()


@pytest.fixture
def saved(catalogue):
    """Save a step on a node; returns (trainer, its generation, its shard)."""
    made: list[Trainer] = []

    def save(a, step=3, length=1 << 20, rank=0, world_size=1, **fields):
        t = Trainer(a.arena, secrets.token_hex(16))
        made.append(t)
        generation = open_session(a, t.session, rank=rank, world_size=world_size, **fields)
        reserve(a, t.session, length)
        lease = until(lambda: a.view(t.session).leases, "a lease")[0]
        words = (lease.slot, lease.incarnation, step, generation, length, rank, RUN, world_size)
        assert "closed" == t.ask("write", *words)
        held = until(
            lambda: [
                h for i, h in catalogue.held(a.name).items() if (i.step, i.rank) == (step, rank)
            ],
            "sealed",
        )
        return t, generation, held[0].shard

    yield save
    for t in made:
        t.end()


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store", make=True)


@pytest.fixture
def stored(node, saved, store, catalogue):
    """Save a step on a node of its own, upload it, forget the node; returns its shard."""

    def make(step=3, length=MIB, rank=0, world_size=1):
        a = node("writer")
        reported(catalogue, "writer")
        t, _, shard = saved(a, step, length, rank, world_size)
        upload(store, shard, bytes_of(a, shard))
        t.end()
        a.kill()
        (a.folder / "arena").rename(a.folder / secrets.token_hex(4))
        del catalogue.inventories["writer"]
        return shard

    return make


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for key in [key for key in os.environ if key.startswith("HOLDFAST_")]:
        monkeypatch.delenv(key)
