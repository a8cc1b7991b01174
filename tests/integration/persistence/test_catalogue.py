"""The worker with the real metadata service: from a commit to a durable checkpoint and on."""

from __future__ import annotations

import pytest
from tests.integration.metadata import process
from tests.integration.persistence.harness import JOB, Holder, segment, until
from tests.integration.persistence.process import WorkerProcess
from tests.said import rank_status

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.inventory import HeldShard, HeldState, Inventory
from holdfast.format import keys
from holdfast.v1 import metadata_pb2 as pb

WORLD = 2


class Cluster:
    """The service, and two nodes whose inventories the test reports."""

    def __init__(self, folder, store_url, queue_url) -> None:
        self.folder = folder
        stored = {"HOLDFAST_STORE": store_url, "HOLDFAST_QUEUE": queue_url}
        self.metadata = process.fork(folder, **stored)
        self.nodes = [Holder(f"n{rank}", folder) for rank in range(WORLD)]
        self.held: list[list[HeldShard]] = [[] for _ in self.nodes]
        self.sequence = 0

    def register(self, nonce=b"n" * 16):
        for rank, node in enumerate(self.nodes):
            seat = self.metadata.call(
                "RegisterRank",
                pb.RegisterRankRequest(
                    spec={
                        "job": JOB, "nonce": nonce, "launcher": "L", "holder": "h", "rank": rank,
                        "world_size": WORLD, "replicas": 0, "persist": {"steps": 10},
                    },
                    node=node.node,
                ),
            ).seat  # fmt: skip
        self.run, self.generation = seat.run, seat.generation
        # It has just come, and listens a while before it lets the attempt begin.
        until(lambda: self.report().state is DecisionState.CONFIRMED, "it begins")

    def save(self, step, length=5000):
        """Every node holds its rank's segment; return the shards."""
        made = []
        for rank, node in enumerate(self.nodes):
            shard, data = segment(
                length, run=self.run, step=step, generation=self.generation, rank=rank, world=WORLD
            )
            node.hold(shard, data)
            self.held[rank].append(
                HeldShard(shard=shard, state=HeldState.SEALED, owner=node.node, slot_incarnation=1)
            )
            made.append(shard)
        self.report()
        return made

    def report(self) -> Decision:
        """Report for every node; return what the attempt should do."""
        self.sequence += 1
        for rank, node in enumerate(self.nodes):
            status = rank_status(job=JOB, run=self.run, generation=self.generation, rank=rank)
            view = self.metadata.report(
                Inventory(
                    node=node.peer, incarnation=1, sequence=self.sequence, budget_bytes=1 << 30,
                    shards=tuple(self.held[rank]), ranks=(status,),
                )
            )  # fmt: skip
        return view.runs[0].decision

    def rows(self):
        answer = self.metadata.http.get(f"/api/v1/jobs/{JOB}/checkpoints")
        assert 200 == answer.status_code, answer.text
        body = answer.json()
        return body if isinstance(body, list) else body["checkpoints"]

    def durable(self):
        return {row["step"] for row in self.rows() if row["durable_at"]}

    def close(self) -> None:
        self.metadata.stop()
        for node in self.nodes:
            node.close()


@pytest.fixture
def cluster(tmp_path, store, store_url, queue_url):
    folder = tmp_path / "metadata"
    folder.mkdir(mode=0o700)
    made = Cluster(folder, store_url, queue_url)
    yield made
    made.close()


def test_a_committed_checkpoint_becomes_durable_by_itself(
    tmp_path, cluster, store, store_url, queue_url
):
    """F85, G10: due by the rule, offered, drained by a worker killed on the way, then another."""
    cluster.register()
    address = cluster.metadata.channel_address
    first = WorkerProcess(
        tmp_path / "w1", address, store_url, queue_url,
        HOLDFAST_WORKER="w1", HOLDFAST_QUEUE_LEASE_S="1", HOLDFAST_PERSIST_RATE="1",
    ).start()  # fmt: skip
    shards = cluster.save(10)
    until(lambda: list(store.open_uploads()), "the first worker has begun")
    first.kill()
    second = WorkerProcess(
        tmp_path / "w2", address, store_url, queue_url,
        HOLDFAST_WORKER="w2", HOLDFAST_QUEUE_LEASE_S="1",
    ).start()  # fmt: skip
    try:
        until(lambda: cluster.durable() == {10}, "durable")
        cluster.save(15)
        cluster.save(20)
        until(lambda: cluster.durable() == {10, 20}, "the next multiple too")
    finally:
        second.kill()
    folder = CheckpointFolder(store, keys.folder(JOB, shards[0].id.checkpoint))
    manifest = folder.manifest()

    assert tuple(shards) == manifest.shards
    assert all(verdict.ok for verdict in verify(folder, manifest))
    assert [] == list(store.open_uploads())
