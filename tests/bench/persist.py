"""Persisting and reading back one shard, beside a bare client, dd and DCP, on the same store.

Ours is the worker's own code on a sealed segment of a real agent: located, mapped, hashed part by
part, uploaded, read back in samples, with its sidecar. The peers move the same bytes from the same
file in tmpfs with as many threads, and check nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from tests.bench.harness import Record, faster, in_turn, share
from tests.bench.subject import Saving, Subject, agent
from tests.e2e.stack import Stack
from tests.servers.ceph import running_ceph

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core import keys
from holdfast.core.digest import PART_BYTES
from holdfast.core.facts import Peer, PersistPlan, Shard
from holdfast.core.units import format_bytes
from holdfast.objectstore import ObjectStore, open_store
from holdfast_services.agent import sidecar
from holdfast_services.persistence.pace import Pace
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.upload import ShardUpload

NAMES = (
    *("persist_s3/bare_client", "restore_s3/bare_client"),
    *("persist_dir/dd", "persist_dir/dd_direct", "persist_dir/dcp"),
)
THREADS_COUNT = 8
RUNS = 5
JOB = "persist"
CEPH_DISK_BYTES = 48 << 30


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield four records over one saved segment."""
    length_bytes = (2 << 30) // (16 if quick else 1)
    budget = format_bytes(4 * length_bytes).replace(" ", "")
    with agent(HOLDFAST_BUDGET=budget) as stack:
        subject = Subject(tensors_count=201, length_bytes=length_bytes)
        saving = Saving(subject, job=JOB)
        saving.train_and_save(1)
        saving.settle()
        bench = _bench(stack)
        yield from _directory(bench, subject)
        with running_ceph(disk_bytes=CEPH_DISK_BYTES) as ceph:
            os.environ.update(ceph.environment)
            yield from _s3(bench, ceph.url())
        saving.ck.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """One sealed segment, who serves it, and the threads that move it."""

    path: Path
    shard: Shard
    plan: PersistPlan
    pool: PartPool

    def persist(self, store: ObjectStore) -> float:
        """Put the shard there; return the seconds. The store is as before afterwards."""
        upload = ShardUpload(store, self.pool, Pace(0), self.plan, threading.Event())
        started_s = time.perf_counter()
        upload.run()
        took_s = time.perf_counter() - started_s
        assert upload.moved.sent_bytes == self.shard.length_bytes, "nothing was there before"
        return took_s

    @property
    def folder(self) -> str:
        """Return the prefix of the checkpoint."""
        return keys.folder(JOB, self.shard.id.checkpoint)


def _bench(stack: Stack) -> _Bench:
    """Return the one segment that lies in the arena, as its agent describes it."""
    (found,) = stack.arena(0).glob("*.sum")
    path = found.with_suffix(".seg")
    shard = sidecar.decode(found.read_bytes(), path.stat().st_size).shard
    words = Path(f"/proc/{stack.agent_pid(0)}/environ").read_bytes().split(b"\0")
    known = dict(word.decode().split("=", 1) for word in words if b"=" in word)
    peer = Peer(
        node=known["HOLDFAST_NODE"],
        rpc_address=f"127.0.0.1:{known['HOLDFAST_RPC_PORT']}",
        data_address=f"127.0.0.1:{known['HOLDFAST_DATA_PORT']}",
    )
    plan = PersistPlan(checkpoint=shard.id.checkpoint, job=JOB, shards=(shard,), sources=(peer,))
    return _Bench(path=path, shard=shard, plan=plan, pool=PartPool(THREADS_COUNT))


def _directory(bench: _Bench, subject: Subject) -> Iterator[Record]:
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build")).resolve()
    length_bytes = bench.shard.length_bytes

    def ours() -> float:
        target = folder / "ours"
        took_s = bench.persist(open_store(f"file://{target}", make=True))
        shutil.rmtree(target)
        return took_s

    def dd(*flags: str) -> float:
        target = folder / "dd"
        command = ["dd", f"if={bench.path}", f"of={target}", f"bs={PART_BYTES}", "conv=fsync"]
        started_s = time.perf_counter()
        subprocess.run([*command, *flags], check=True, capture_output=True, timeout=300)
        took_s = time.perf_counter() - started_s
        target.unlink()
        return took_s

    def save() -> float:
        target = folder / "dcp"
        writer = dcp.FileSystemWriter(target)
        started_s = time.perf_counter()
        dcp.save(subject.state_dict(), storage_writer=writer, no_dist=True)
        took_s = time.perf_counter() - started_s
        shutil.rmtree(target)
        return took_s

    try:
        ours_s, dd_s = in_turn(ours, dd, runs=RUNS, warm_up=1)
        yield share(
            "persist_dir/dd",
            ours_s,
            dd_s,
            peer="dd conv=fsync from the same tmpfs file",
            length_bytes=length_bytes,
            note="durable both; ours hashed before and sampled after",
            share_min=0.9,
        )
        ours_s, dd_s = in_turn(ours, lambda: dd("oflag=direct"), runs=RUNS, warm_up=1)
        yield share(
            "persist_dir/dd_direct",
            ours_s,
            dd_s,
            peer="dd oflag=direct conv=fsync: past the page cache like ours",
            length_bytes=length_bytes,
            note="the limit of the disk for one writer",
            share_min=0.9,
        )
        ours_s, dcp_s = in_turn(ours, save, runs=RUNS, warm_up=1)
        yield faster(
            "persist_dir/dcp",
            ours_s,
            dcp_s,
            peer="dcp.save of the same state, FileSystemWriter with fsync",
            length_bytes=length_bytes,
            note="both from memory to a durable folder",
            times_min=1.5,
        )
    finally:
        shutil.rmtree(folder)


def _s3(bench: _Bench, url: str) -> Iterator[Record]:
    store = open_store(url)
    bare = _Bare(url)
    length_bytes = bench.shard.length_bytes

    def put() -> float:
        took_s = bench.persist(store)
        store.delete([info.key for info in store.list(bench.folder)])
        return took_s

    def bare_put() -> float:
        took_s = bare.put(bench.path)
        store.delete(["bare"])
        return took_s

    ours_s, peer_s = in_turn(put, bare_put, runs=RUNS, warm_up=1)
    note = f"{THREADS_COUNT} threads, 16 MiB parts, Ceph RGW on the same two cores"
    yield share(
        "persist_s3/bare_client",
        ours_s,
        peer_s,
        peer="minio.put_object, same threads and parts",
        length_bytes=length_bytes,
        note=note,
        share_min=0.95,
    )
    bench.persist(store)
    folder = CheckpointFolder(store, bench.folder)
    destination = memoryview(bytearray(length_bytes))

    def get() -> float:
        started_s = time.perf_counter()
        known = folder.sidecar(bench.shard)
        folder.fetch(
            bench.shard,
            known,
            destination,
            done=set(),
            threads=THREADS_COUNT,
            stop=threading.Event(),
        )
        return time.perf_counter() - started_s

    key = folder.segment_key(bench.shard)
    ours_s, peer_s = in_turn(get, lambda: bare.get(key, destination), runs=RUNS, warm_up=1)
    yield share(
        "restore_s3/bare_client",
        ours_s,
        peer_s,
        peer="minio.get_object, ranges of 16 MiB, same threads",
        length_bytes=length_bytes,
        note=f"{note}; ours verifies every part",
        share_min=0.9,
    )


class _Bare:
    """The peer: minio's client, as its documentation has it."""

    def __init__(self, url: str) -> None:
        import urllib.parse

        import minio

        parts = urllib.parse.urlsplit(url)
        query = urllib.parse.parse_qs(parts.query)
        endpoint = urllib.parse.urlsplit(query["endpoint"][0])
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._client = minio.Minio(
            endpoint.netloc,
            access_key=os.environ["AWS_ACCESS_KEY_ID"],
            secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            secure=endpoint.scheme == "https",
        )

    def put(self, path: Path) -> float:
        """Upload the file; return the seconds."""
        started_s = time.perf_counter()
        with path.open("rb") as file:
            self._client.put_object(
                self._bucket,
                self._name("bare"),
                file,
                path.stat().st_size,
                part_size=PART_BYTES,
                num_parallel_uploads=THREADS_COUNT,
            )
        return time.perf_counter() - started_s

    def get(self, key: str, destination: memoryview) -> float:
        """Read the object by ranges into ``destination``; return the seconds."""

        def fetch(begin: int) -> None:
            end = min(begin + PART_BYTES, len(destination))
            answer = self._client.get_object(
                self._bucket, self._name(key), offset=begin, length=end - begin
            )
            try:
                destination[begin:end] = answer.read()
            finally:
                answer.close()
                answer.release_conn()

        started_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS_COUNT) as threads:
            list(threads.map(fetch, range(0, len(destination), PART_BYTES)))
        return time.perf_counter() - started_s

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key
