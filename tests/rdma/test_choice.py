"""Which transports a node has, by what its cards and its limits are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.rdma.plane import plane

ROOT = Path(__file__).parents[2]
LITTLE_MEMLOCK = (
    "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=1048576",
)  # fmt: skip


def test_all_cards_of_this_node_are_used():
    assert [
        ["rdma", "cardA0/1 (10.2.0.1), cardA1/1 (10.2.1.1)", ""], ["tcp", "", ""]
    ] == plane("auto", 1 << 30)  # fmt: skip


def test_with_little_memlock_tcp_is_used_and_the_cure_is_said():
    done = subprocess.run(
        [*LITTLE_MEMLOCK, sys.executable, "-m", "tests.rdma.plane", "auto", str(1 << 30)],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    rdma, tcp = done.stdout.splitlines()

    assert rdma.startswith("rdma||memlock limit 1024 KiB is less than the budget at each port, 2 x")
    assert "tcp||" == tcp


@pytest.fixture
def bare_card():
    """A card whose interface has no address: no GID of RoCE v2 that others could reach."""
    commands = (
        "ip link add bare0 type veth peer name bare1",
        "ip link set bare0 up",
        "ip link set bare1 up",
        "rdma link add bare type rxe netdev bare0",
        "nsenter --net=/proc/1/ns/net rdma dev set bare netns A",
    )
    for command in commands:
        subprocess.run(command.split(), check=True)
    yield "bare"
    subprocess.run(["ip", "link", "del", "bare0"], check=True)


def test_with_a_card_without_a_gid_of_roce_v2_tcp_is_used(bare_card):
    [[kind, _, why], tcp] = plane(bare_card, 1 << 30)

    assert "rdma" == kind
    assert why.startswith("bare/1 has no GID of RoCE v2 with an address of this host: give its")
    assert ["tcp", "", ""] == tcp
