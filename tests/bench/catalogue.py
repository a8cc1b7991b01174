"""A thousand durable checkpoints: how long they take to list, and what to collect to plan."""

from __future__ import annotations

import statistics
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

from tests.bench.harness import RUNS_MIN, Record
from tests.bench.subject import agent
from tests.e2e.stack import Stack

from holdfast.core import keys, manifest
from holdfast.core.facts import Shard
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.objectstore import open_store

NAMES = ("catalogue/list_1000", "catalogue/collect_plan_1000")
CHECKPOINTS_COUNT = 1000
JOB = "many"
RUN = "0123456789ab"


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the times of two REST calls; the checkpoints come from a bucket, by a rebuild."""
    count = CHECKPOINTS_COUNT // (10 if quick else 1)
    with agent() as stack:
        _fill(stack.info["store"], count)
        stack.holdfast("doctor", "--rebuild")
        stack.holdfast("retain", JOB, "--last", "10", "--every", "50000")
        yield _timed(
            "catalogue/list_1000",
            lambda: _get(stack, f"jobs/{JOB}/checkpoints?limit={count}"),
            count,
            ms_max=50,
        )
        yield _timed(
            "catalogue/collect_plan_1000",
            lambda: _get(stack, f"jobs/{JOB}/collect"),
            count,
            ms_max=1000,
        )


def _fill(url: str, count: int) -> None:
    store = open_store(url)
    for number in range(1, count + 1):
        checkpoint = CheckpointId(RunId(RUN), Step(number * 100), Generation(1))
        shards = tuple(
            Shard(
                id=ShardId(*_fields(checkpoint), rank=Rank(rank)),
                job=JOB,
                world_size=8,
                plan_hash=f"plan{rank}",
                length_bytes=1 << 30,
                root_digest=bytes(16),
            )
            for rank in range(8)
        )
        whole = manifest.Manifest(
            checkpoint=checkpoint,
            job=JOB,
            world_size=8,
            shards=shards,
            write_id=f"{number:032x}",
            created_at_s=1e9 + number,
        )
        store.put(keys.manifest_key(JOB, checkpoint), manifest.encode(whole))


def _fields(checkpoint: CheckpointId) -> tuple[RunId, Step, Generation]:
    return checkpoint.run, checkpoint.step, checkpoint.generation


def _get(stack: Stack, path: str) -> bytes:
    url = urllib.parse.urljoin(stack.info["rest_url"] + "/", f"api/v1/{path}")
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def _timed(name: str, call: Callable[[], bytes], count: int, *, ms_max: float) -> Record:
    times_s = []
    for _ in range(2 + 2 * RUNS_MIN):
        started_s = time.perf_counter()
        body = call()
        times_s.append(time.perf_counter() - started_s)
    value_ms = statistics.median(times_s[2:]) * 1e3
    return Record(
        name=name,
        value=value_ms,
        unit="ms",
        peer="",
        peer_value=None,
        ratio=value_ms / ms_max,
        bytes=len(body),
        note=f"REST, {count} durable checkpoints of 8 shards, SQLite",
        target=f"<= {ms_max:g} ms",
        met=value_ms <= ms_max,
    )
