"""Real agents: processes, sockets, tmpfs; the catalogue is a small servicer in the test."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from .harness import Catalogue, Node


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


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for key in [key for key in os.environ if key.startswith("HOLDFAST_")]:
        monkeypatch.delenv(key)
