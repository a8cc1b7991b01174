"""Two nodes with an agent each: copies and restores go over RDMA, or over TCP and say why.

Node *a* is in the namespace where this runs, *b* in the other; see ``two_nodes.sh``. An agent takes
long to start in an emulated machine: the tests share two.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.agent.harness import (
    RUN,
    Catalogue,
    Node,
    Trainer,
    bytes_of,
    open_session,
    reported,
    reserve,
    shard_message,
    until,
    want,
)

from holdfast.core.inventory import Endpoint
from holdfast.core.node_view import WantReason
from holdfast.core.protection import Copies
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2

LENGTH = (16 << 20) + 5000
# From nothing: what the libraries of RDMA hold is not for forks.
PLACES = {"a": ("10.2.0.1", ("env",)), "b": ("10.2.0.2", ("ip", "netns", "exec", "B"))}
EMULATED_S_MAX = 120.0


@pytest.fixture(scope="module")
def catalogue():
    service = Catalogue(PLACES["a"][0])
    yield service
    service.stop()


@pytest.fixture(scope="module")
def nodes(catalogue):
    """The agents a and b, on their nodes."""
    folder = Path(tempfile.mkdtemp(prefix="hf", dir="/dev/shm"))
    made = []
    for name, (address, under) in PLACES.items():
        environ = {"HOLDFAST_LISTEN_HOST": address, "HOLDFAST_INSECURE": "1"}
        made.append(Node(name, folder / name, catalogue.address, environ, under))
        made[-1].spawn()
    for node in made:
        node.wait_ready(EMULATED_S_MAX)
    reported(catalogue, *PLACES)
    yield made
    for node in made:
        node.kill()
    shutil.rmtree(folder)


@pytest.fixture
def save(catalogue):
    """Save a step on a node; return its shard. The trainer lives until the end of the test."""
    trainers: list[Trainer] = []

    def one(node, step):
        trainer = Trainer(node.arena, secrets.token_hex(16))
        trainers.append(trainer)
        nonce = secrets.token_bytes(16)
        generation = open_session(node, trainer.session, nonce=nonce, replicas=1)
        reserve(node, trainer.session, LENGTH)
        lease = until(lambda: node.view(trainer.session).leases, "a lease")[0]
        words = (lease.slot, lease.incarnation, step, generation, LENGTH, 0, RUN, 1)
        assert "closed" == trainer.ask("write", *words)
        return until(
            lambda: [h.shard for i, h in catalogue.held(node.name).items() if i.step == step],
            "sealed",
        )[0]

    yield one
    for trainer in trainers:
        trainer.end()


def fetched(node) -> dict[str, int]:
    answer = node.call("Describe", pb.DescribeRequest())
    return {one.kind: one.fetched_bytes for one in answer.transports}


def test_a_node_that_was_lost_recovers_over_rdma(catalogue, nodes, save):
    """F29, F34: replicate, lose, recover; every byte over RDMA, none over TCP."""
    a, b = nodes
    catalogue.set_run(ring=("a", "b"), copies=Copies(1))
    shard = save(a, 3)
    until(lambda: shard.id in catalogue.held("b"), "a copy at b", EMULATED_S_MAX)
    before = bytes_of(a, shard)
    assert before == bytes_of(b, shard)
    assert {"rdma": LENGTH, "tcp": 0} == fetched(b)

    a.kill()
    shutil.rmtree(a.arena)
    del catalogue.inventories["a"]
    a.spawn()
    a.wait_ready(EMULATED_S_MAX)
    reported(catalogue, "a")
    wanted = want(shard, "b", reason=WantReason.REPAIR, owner="a")
    catalogue.set_run(wants={"a": (wanted,)})
    until(lambda: shard.id in catalogue.held("a"), "recovered", EMULATED_S_MAX)

    assert before == bytes_of(a, shard)
    assert {"rdma": LENGTH, "tcp": 0} == fetched(a)
    assert [] == [event for event in catalogue.events if event.kind.startswith("transport")]


def test_a_fetch_that_rdma_fails_goes_over_tcp_and_says_why(catalogue, nodes, save):
    """Nobody listens where the peer says that it lends; over TCP it serves."""
    a, b = nodes
    catalogue.set_run(ring=("a",), copies=Copies(0))
    shard, before = save(a, 5), fetched(b)
    known = catalogue.inventories["a"].node
    endpoints = tuple(
        Endpoint(kind="rdma", address="10.2.0.1:1") if one.kind == "rdma" else one
        for one in known.endpoints
    )
    source = codec.to_message(replace(known, endpoints=endpoints), common_pb2.Peer)
    b.call_peer("Hold", pb.HoldRequest(shard=shard_message(shard), source=source))

    assert {**before, "tcp": LENGTH} == fetched(b)
    [why] = until(lambda: catalogue.said("transport_left"), "told")
    assert why.startswith("rdma://10.2.0.1:1 is left for tcp for 60 s: cannot reach 10.2.0.1:1")
