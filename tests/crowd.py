"""A catalogue that is full: thousands of checkpoints, nodes and ranks, written in seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tests.said import attempt_spec, rank_status, tcp

from holdfast.core.ids import CheckpointId, ShardId
from holdfast.core.inventory import HeldShard, HeldState, Inventory, Peer
from holdfast.core.reports import RankCosts
from holdfast.core.shard import Shard
from holdfast.core.user_events import Event
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata import tables as t
from holdfast_services.metadata.domain.model import Attempt, RankFacts
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache

JOB = "gpt/large"
RUN = "0123456789ab"
LEASE_S = 3600.0
RANKS_PER_NODE = 8
ROWS_PER_INSERT = 1000


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """How much there is: durable checkpoints of one job, other jobs, nodes of eight ranks each."""

    checkpoints: int = 10_000
    jobs: int = 200
    nodes: int = 1_280
    events: int = 2_000

    @property
    def ranks(self):
        """All ranks of the one job."""
        return self.nodes * RANKS_PER_NODE


def fill(url, crowd):
    """Fill an empty database."""
    engine = make_engine(url, connections_max=1)
    upgrade(engine)
    try:
        with write_transaction(engine) as connection:
            catalogue = Catalogue(connection, DecodeCache())
            now_s = catalogue.now_s()
            newest = CheckpointId(RUN, crowd.checkpoints + 1, 1)
            _add_run(catalogue, crowd, now_s)
            _add_rows(connection, crowd, now_s, newest)
            for number in range(crowd.nodes):
                catalogue.put_inventory(inventory(number, crowd, newest), now_s, now_s + LEASE_S)
            for number in range(crowd.jobs):
                catalogue.add_job(f"other/job-{number:05d}", f"{number:012x}", now_s)
            catalogue.add_events(_events(crowd), "node-00001", now_s)
            before_s, _ = catalogue.pulse()
            catalogue.beat(before_s, now_s, 1.0)
    finally:
        engine.dispose()


def inventory(number, crowd, newest):
    """What a node has: the newest step of its ranks, and of the ranks of the node before it."""
    name, before = f"node-{number:05d}", f"node-{(number - 1) % crowd.nodes:05d}"
    first = number * RANKS_PER_NODE
    copied = (number - 1) % crowd.nodes * RANKS_PER_NODE
    own = [held(newest, first + rank, crowd, name) for rank in range(RANKS_PER_NODE)]
    copies = [held(newest, copied + rank, crowd, before) for rank in range(RANKS_PER_NODE)]
    step = newest.step + 3
    costs = RankCosts(stall_s=0.31, copy_s=1.2, save_bytes=1 << 30, fetch_s=4.0, load_s=1.5)
    ranks = [
        rank_status(
            job=JOB,
            run=RUN,
            generation=1,
            rank=first + rank,
            nonce=b"n",
            step=step,
            step_s=2.0,
            loaded=True,
            costs=costs,
            saving=(step,),
            save_interval_s=60.0,
            interval_why="every 60 s: a save costs 0.31 s, a failure is seen every 2 h",
        )
        for rank in range(RANKS_PER_NODE)
    ]
    return Inventory(
        node=Peer(
            node=name,
            rpc_address=f"{name}:7371",
            endpoints=tcp(f"{name}:7372"),
            domain=f"rack-{number // 16:03d}",
        ),
        incarnation=1,
        sequence=1,
        budget_bytes=64 << 30,
        used_bytes=(16 + number % 40) << 30,
        shards=(*own, *copies),
        ranks=tuple(ranks),
        seen=(newest,),
    )


def held(key, rank, crowd, owner):
    """One sealed shard of ``rank``, saved on ``owner``."""
    shard = Shard(
        id=ShardId(key.run, key.step, key.generation, rank),
        job=JOB,
        world_size=crowd.ranks,
        plan_hash="plan",
        length_bytes=1 << 30,
        root_digest=rank.to_bytes(16, "big"),
    )
    return HeldShard(shard=shard, state=HeldState.SEALED, owner=owner, slot_incarnation=1)


def _add_run(catalogue, crowd, now_s):
    catalogue.add_job(JOB, RUN, now_s)
    run = catalogue.load_run(RUN)
    spec = attempt_spec(job=JOB, holder="ada@login-1", world_size=crowd.ranks, replicas=1)
    attempt = Attempt(
        generation=1,
        spec=spec,
        started_at_s=now_s - 7200,
        lease_until_s=now_s + LEASE_S,
        allowed=spec.protection,
    )
    ranks = tuple(
        RankFacts(
            rank=rank,
            node=f"node-{rank // RANKS_PER_NODE:05d}",
            registered_at_s=now_s - 7200,
            loaded=True,
        )
        for rank in range(crowd.ranks)
    )
    catalogue.save_run(run, replace(run, generation=1, attempt=attempt, ranks=ranks))


def _add_rows(connection, crowd, now_s, newest):
    rows = [
        _row(step, crowd, now_s - 60.0 * (crowd.checkpoints - step + 1)) for step in _steps(crowd)
    ]
    objects = [_object(step) for step in _steps(crowd)]
    rows.append({**_row(newest.step, crowd, now_s - 5.0), "durable_at_s": None})
    for table, made in ((t.checkpoints, rows), (t.objects, objects)):
        for first in range(0, len(made), ROWS_PER_INSERT):
            connection.execute(table.insert(), made[first : first + ROWS_PER_INSERT])


def _steps(crowd):
    return range(1, crowd.checkpoints + 1)


def _row(step, crowd, at_s):
    return {
        "run": RUN,
        "step": step,
        "generation": 1,
        "world_size": crowd.ranks,
        "plan_hash": "plan",
        "length_bytes": crowd.ranks << 30,
        "local_at_s": at_s,
        "replicated_at_s": at_s + 1.5 + step % 7 / 10,
        "copied_at_s": at_s + 2.5,
        "durable_at_s": at_s + 20.0 + step % 13,
        "drain_at_s": None,
        "notes": json.dumps({"loss": 1 / step}),
        "parent_step": None,
        "parent_generation": None,
    }


def _object(step):
    return {
        "run": RUN,
        "step": step,
        "generation": 1,
        "manifest_digest": bytes(16),
        "scrubbed_at_s": None,
        "scrub_asked": False,
        "bad": "[]",
        "expired_at_s": None,
        "body": b"",
    }


def _events(crowd):
    kinds = ("node_lost", "step_abandoned", "replication_failed", "round_failed")
    return [
        Event(
            kind=kinds[number % len(kinds)],
            severity="warning",
            message=f"node-{number:05d} has been silent for 5 s and counts as lost",
            job=JOB,
            context={"step": str(number)},
        )
        for number in range(crowd.events)
    ]
