"""Transports over the devices of the machine; a peer on the other node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.inventory import Endpoint
from holdfast_services.transport.rdma.transport import KIND, RdmaTransport, find_places

ROOT = Path(__file__).parents[2]
ON_B = ("ip", "netns", "exec", "B")


@pytest.fixture
def transport():
    """Make transports of this node, A; all are closed at the end."""
    made = []

    def make() -> RdmaTransport:
        made.append(RdmaTransport(find_places((), 0), "127.0.0.1"))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def peer():
    """Start peers on the other node, B, see ``peer.py``; returns (process, its endpoints)."""
    started = []

    def start(*words: object, host: str = "10.2.0.2"):
        process = subprocess.Popen(
            [*ON_B, sys.executable, "-m", "tests.rdma.peer", host, *map(str, words)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        address = process.stdout.readline().strip()
        assert address, "the peer did not start"
        return process, (Endpoint(kind=KIND, address=address),)

    yield start
    for process in started:
        process.kill()
        process.communicate()
