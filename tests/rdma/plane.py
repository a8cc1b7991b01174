"""Says which transports a node would have: ``python -m tests.rdma.plane DEVICES BUDGET_BYTES``."""

from __future__ import annotations

import sys

from holdfast_services.agent.data_plane import data_plane
from holdfast_services.agent.settings import Settings


def plane(devices: str, budget_bytes: int) -> list[list[str]]:
    """Return kind, place and problem of each transport that an agent would have here."""
    environ = {
        "HOLDFAST_ADDRESS": "127.0.0.1:1",
        "HOLDFAST_AGENT": "/run/a.sock",
        "HOLDFAST_ARENA": "/dev/shm/a",
        "HOLDFAST_RDMA": devices,
    }
    states = data_plane(Settings.from_env(environ), budget_bytes).states()
    return [[state.kind, state.place, state.problem] for state in states]


if __name__ == "__main__":
    for words in plane(sys.argv[1], int(sys.argv[2])):
        print("|".join(words))
