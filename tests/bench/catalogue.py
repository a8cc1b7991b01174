"""A thousand durable checkpoints: how long they take to list, and what to collect to plan.

The metadata service runs alone, over SQLite and over Postgres: no worker deletes what is timed.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import RUNS_MIN, Record
from tests.servers.postgres import running_postgres
from tests.servers.processes import Children

from holdfast.cli.rest import Rest
from holdfast.core.ids import CheckpointId, Generation, Rank, RunId, ShardId, Step
from holdfast.core.shard import Shard
from holdfast.format import keys, manifest
from holdfast.objectstore import open_store

NAMES = (
    "catalogue/list_1000",
    "catalogue/collect_plan_1000",
    "catalogue/list_1000_postgres",
    "catalogue/collect_plan_1000_postgres",
)
CHECKPOINTS_COUNT = 1000
LIST_MS_MAX = 50.0
PLAN_MS_MAX = 1000.0
START_S_MAX = 60.0
JOB = "many"
RUN = "0123456789ab"


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the times of two REST calls; the checkpoints come from a bucket, by a rebuild."""
    count = CHECKPOINTS_COUNT // (10 if quick else 1)
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder = Path(name)
        yield from _measure(folder, f"sqlite:///{folder / 'metadata.db'}", count)
    with tempfile.TemporaryDirectory(prefix="hf-") as name, running_postgres() as server:
        yield from _measure(Path(name), server.url(server.create()), count, "_postgres")


def _measure(folder: Path, database_url: str, count: int, suffix: str = "") -> Iterator[Record]:
    database = "Postgres, no fsync" if suffix else "SQLite"
    note = f"REST, {count} durable checkpoints of 8 shards, {database}"
    store_url = f"file://{folder / 'store'}"
    (folder / "store").mkdir()
    _fill(store_url, count)
    settings = {
        "HOLDFAST_STORE": store_url,
        "HOLDFAST_QUEUE": f"sqlite:///{folder / 'queue.db'}",
    }
    with running_metadata(folder, database_url, **settings) as ready:
        rest = Rest(ready["rest_url"].rstrip("/"))
        rest.rebuild(JOB)
        listing = f"{rest.url}/api/v1/jobs/{JOB}/checkpoints?limit={count}"
        yield _timed(f"catalogue/list_1000{suffix}", listing, count, note, ms_max=LIST_MS_MAX)
        rest.of_job("PUT", JOB, "/retention", {"last": 10, "every": 50_000})
        plan = f"{rest.url}/api/v1/jobs/{JOB}/collect"
        yield _timed(f"catalogue/collect_plan_1000{suffix}", plan, count, note, ms_max=PLAN_MS_MAX)


@contextlib.contextmanager
def running_metadata(folder: Path, database_url: str, **more: str) -> Iterator[dict[str, str]]:
    """Run the metadata service alone; yield where it listens. It ends with the block."""
    ready = folder / "ready.json"
    settings = {
        "HOLDFAST_DATABASE_URL": database_url,
        "HOLDFAST_LISTEN": "127.0.0.1:0",
        "HOLDFAST_REST_LISTEN": "127.0.0.1:0",
        "HOLDFAST_READY_FILE": str(ready),
        **more,
    }
    children = Children(folder)
    try:
        environ = (f"{name}={value}" for name, value in settings.items())
        command = (sys.executable, "-m", "holdfast_services.metadata")
        children.start("metadata", "env", *environ, *command)
        children.wait("metadata", ready.exists, start_s_max=START_S_MAX)
        yield json.loads(ready.read_text(encoding="utf-8"))
    finally:
        children.end()


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


def _timed(name: str, url: str, count: int, note: str, *, ms_max: float) -> Record:
    times_s = []
    for _ in range(2 + 2 * RUNS_MIN):
        started_s = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as answer:
            body: bytes = answer.read()
        times_s.append(time.perf_counter() - started_s)
        assert len(json.loads(body)) == count, "one row for each checkpoint"
    value_ms = statistics.median(times_s[2:]) * 1e3
    return Record(
        name=name,
        value=value_ms,
        unit="ms",
        peer="",
        peer_value=None,
        ratio=value_ms / ms_max,
        bytes=len(body),
        note=note,
        target=f"<= {ms_max:g} ms",
        met=value_ms <= ms_max,
    )
