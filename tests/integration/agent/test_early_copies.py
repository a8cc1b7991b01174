"""A node that comes has a shard before a rank of it registers (ADR 0077); all but torch is real."""

from __future__ import annotations

import secrets

import pytest
from tests.integration.metadata import process

from holdfast.core.attempts import named_nonce
from holdfast.core.rounds import LauncherReport, LaunchRequest, LaunchView, Terms
from holdfast.rpc import codec
from holdfast.v1 import agent_pb2, metadata_pb2
from holdfast_services.metadata.domain.attempt_start import first_run

from .harness import Node, Trainer, open_session, reserve, until

MIB = 1 << 20
TERMS = Terms(command="c", nodes_min=1, nodes_max=2, shrink_after_s=0.0)


class Launcher:
    """What a launcher of a node says, and what metadata answers."""

    def __init__(self, metadata, node):
        self._metadata, self._node = metadata, node
        self._sequence = 0

    def say(self, nonce=""):
        self._sequence += 1
        report = LauncherReport(
            launcher=self._node * 32, sequence=self._sequence, job="job", terms=TERMS, round=nonce,
            port=7000 + self._sequence,
        )  # fmt: skip
        asked = LaunchRequest(
            report=report, version="", wait_s=0.0, node=self._node, address=self._node
        )
        message = codec.to_message(asked, metadata_pb2.LaunchRequest)
        return codec.from_message(self._metadata.call("Launch", message), LaunchView)


@pytest.fixture
def metadata(tmp_path):
    running = process.fork(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def nodes(shm, metadata):
    made = [Node(name, shm / name, metadata.channel_address, {}) for name in "ab"]
    for node in made:
        node.start()
    yield made
    for node in made:
        node.kill()


@pytest.fixture
def begin():
    """Begin a rank of an attempt; returns (its process, generation)."""
    made = []

    def rank(node, number, world, nonce):
        trainer = Trainer(node.arena, secrets.token_hex(16))
        made.append(trainer)
        said = {"rank": number, "world_size": world, "nonce": named_nonce(nonce)}
        return trainer, open_session(node, trainer.session, **said)

    yield rank
    for trainer in made:
        trainer.end()


def told(node, trainer, step):
    report = {"loaded": True, "step": step, "step_s": 1.0}
    node.call("Update", agent_pb2.UpdateRequest(session=trainer.session, report=report))


def test_a_node_that_comes_has_the_last_step_before_its_rank_restores_it(metadata, nodes, begin):
    a, b = nodes
    first, late = Launcher(metadata, "a"), Launcher(metadata, "b")
    nonce = first.say().place.nonce
    rank, generation = begin(a, 0, 1, nonce)
    reserve(a, rank.session, MIB)
    until(lambda: (found := a.view(rank.session).restore) and found.decision.fresh, "no step yet")
    told(a, rank, 1)
    first.say(nonce)
    late.say()
    last = until(lambda: a.view(rank.session).announcement, "a last step").step
    lease = until(lambda: a.view(rank.session).leases, "a lease")[0]
    words = (lease.slot, lease.incarnation, last, generation, MIB, 0, first_run("job"), 1)
    assert "closed" == rank.ask("write", *words)
    told(a, rank, last)

    [name] = until(lambda: b.files("seg"), "the shard, though no rank of the next round is there")
    rank.end()
    nonce = until(lambda: late.say().place, "the next round").nonce
    mates = [(node, begin(node, number, 2, nonce)[0]) for number, node in enumerate(nodes)]

    for node, mate in mates:
        until(lambda n=node, m=mate: n.view(m.session).restore.segments, "confirmed")
    [segment] = b.view(mates[1][1].session).restore.segments
    assert (name, "peer") == (segment.file_name, segment.source), "nothing was fetched anew"
    assert [name] == b.files("seg")
