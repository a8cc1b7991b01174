"""Persisting and reading back one shard, beside bare clients, dd and DCP, on the same store.

Ours is the worker's own code on a sealed segment of a real agent: located, mapped, hashed part by
part, uploaded, read back in samples, with its sidecar. The peers move the same bytes from the same
file in tmpfs, with as many threads and the same way past the page cache, and check nothing. What
was timed is looked for afterwards, whole, ours and theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from tests.bench.clients import Bare, Minio
from tests.bench.harness import Record, faster, in_turn, share
from tests.bench.subject import PATIENCE_S, Saving, Subject, agent
from tests.e2e.stack import Stack
from tests.said import tcp
from tests.servers.ceph import running_ceph

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Peer
from holdfast.core.persistence_work import ShardWork
from holdfast.core.shard import Shard
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore import ObjectStore, open_store
from holdfast_services.agent import sidecar
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.source import Sources
from holdfast_services.persistence.upload import ShardUpload
from holdfast_services.transport.tcp import TcpTransport

NAMES = (
    *("persist_s3/bare_client", "persist_s3/minio", "restore_s3/bare_client", "restore_s3/minio"),
    *("persist_dir/dd", "persist_dir/dd_cached", "persist_dir/dcp", "persist_dir/unchanged"),
)
THREADS_COUNT = 8
RUNS = 5
JOB = "persist"
CEPH_DISK_BYTES = 48 << 30
DD_S_MAX = 300.0
S3_NOTE = f"{THREADS_COUNT} threads, 16 MiB parts, Ceph RGW on the same two cores"


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield the records, all over one saved segment, and one that differs in its header alone."""
    length_bytes = (2 << 30) // (16 if quick else 1)
    budget = format_bytes(4 * length_bytes).replace(" ", "")
    Path("build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="build")).resolve()
    with agent(HOLDFAST_BUDGET=budget) as stack, ExitStack() as after:
        after.callback(shutil.rmtree, folder)
        subject = Subject(tensors_count=201, length_bytes=length_bytes)
        saving = Saving(subject, job=JOB)
        after.callback(saving.ck.close)
        saving.ck.save(1).wait("local", timeout_s=PATIENCE_S)
        before = _bench(stack)
        before.persist(open_store(f"file://{folder / 'unchanged'}", make=True))
        saving.ck.save(2).wait("local", timeout_s=PATIENCE_S)
        bench = _bench(stack)
        yield from _directory(bench, subject, folder)
        yield _unchanged(bench, before.plan.checkpoint, folder / "unchanged")
        shutil.rmtree(folder / "unchanged")
        with running_ceph(disk_bytes=CEPH_DISK_BYTES) as ceph:
            os.environ.update(ceph.environment)
            yield from _s3(bench, ceph.url())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """One sealed segment, who serves it, and the threads that move it."""

    path: Path
    plan: ShardWork
    pool: PartPool

    @property
    def shard(self) -> Shard:
        """The shard that is measured."""
        return self.plan.shard

    def persist(self, store: ObjectStore, plan: ShardWork | None = None) -> float:
        """Put the shard there and nothing else; return the seconds."""
        plan = plan or self.plan
        copies = Sources(plan.shard, plan.sources, self.pool, TcpTransport())
        upload = ShardUpload(store, self.pool, Pace(0), plan, threading.Event(), copies)
        started_s = time.perf_counter()
        upload.run()
        took_s = time.perf_counter() - started_s
        shard = plan.shard
        moved = upload.moved
        assert moved.sent_bytes + moved.copied_bytes == shard.length_bytes, "nothing was there"
        assert bool(plan.earlier) == bool(moved.copied_bytes)
        folder = CheckpointFolder(store, keys.folder(JOB, plan.checkpoint))
        folder.check_length(shard)
        assert folder.sidecar(shard).shard == shard, "committed: its sidecar says so"
        return took_s

    @property
    def folder(self) -> str:
        """Return the prefix of the checkpoint."""
        return keys.folder(JOB, self.shard.id.checkpoint)


def _bench(stack: Stack) -> _Bench:
    """Return the newest segment that lies in the arena, as its agent describes it."""
    words = Path(f"/proc/{stack.agent_pid(0)}/environ").read_bytes().split(b"\0")
    known = dict(word.decode().split("=", 1) for word in words if b"=" in word)
    peer = Peer(
        node=known["HOLDFAST_NODE"],
        rpc_address=f"127.0.0.1:{known['HOLDFAST_RPC_PORT']}",
        endpoints=tcp(f"127.0.0.1:{known['HOLDFAST_DATA_PORT']}"),
    )
    found = []
    for sealed in stack.arena(0).glob("*.sum"):
        path = sealed.with_suffix(".seg")
        found.append((sidecar.decode(sealed.read_bytes(), path.stat().st_size).shard, path))
    shard, path = max(found, key=lambda one: one[0].id.step)
    plan = ShardWork(shard=shard, sources=(peer,))
    return _Bench(path=path, plan=plan, pool=PartPool(THREADS_COUNT))


def _directory(bench: _Bench, subject: Subject, folder: Path) -> Iterator[Record]:
    length_bytes = bench.shard.length_bytes

    def ours() -> float:
        target = folder / "ours"
        took_s = bench.persist(open_store(f"file://{target}", make=True))
        shutil.rmtree(target)
        return took_s

    ours_s, dd_s = in_turn(
        ours,
        lambda: _dd(bench.path, folder / "dd", THREADS_COUNT, "oflag=direct"),
        runs=RUNS,
        warm_up=1,
    )
    yield share(
        "persist_dir/dd",
        ours_s,
        dd_s,
        peer=f"{THREADS_COUNT} dd oflag=direct conv=fsync side by side, same tmpfs file",
        length_bytes=length_bytes,
        note="durable both, past the page cache both; ours hashed before and sampled after",
        share_min=0.9,
    )
    ours_s, dd_s = in_turn(ours, lambda: _dd(bench.path, folder / "dd", 1), runs=RUNS, warm_up=1)
    yield share(
        "persist_dir/dd_cached",
        ours_s,
        dd_s,
        peer="one dd conv=fsync, through the page cache",
        length_bytes=length_bytes,
        note="what a copy by hand would take; not the disk's limit",
        share_min=0,
    )
    ours_s, dcp_s = in_turn(ours, lambda: _dcp(subject, folder / "dcp"), runs=RUNS, warm_up=1)
    yield faster(
        "persist_dir/dcp",
        ours_s,
        dcp_s,
        peer=f"dcp.save of the same state, {THREADS_COUNT} threads, with fsync",
        length_bytes=length_bytes,
        note="both from memory to a durable folder",
        times_min=1.5,
    )


def _dd(source: Path, target: Path, count: int, *flags: str) -> float:
    """Have ``count`` of them write a share each, side by side, into a file of full length."""
    length_bytes = source.stat().st_size
    share_count = -(-length_bytes // PART_BYTES // count) + 1
    command = ["dd", f"if={source}", f"of={target}", f"bs={PART_BYTES}", *flags]
    started_s = time.perf_counter()
    with target.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, length_bytes)
    started = [
        subprocess.Popen(
            [*command, "conv=fsync,notrunc", f"count={share_count}",
             f"skip={share_count * number}", f"seek={share_count * number}"],
            stderr=subprocess.DEVNULL,
        )
        for number in range(-(-length_bytes // PART_BYTES // share_count))
    ]  # fmt: skip
    codes = [process.wait(DD_S_MAX) for process in started]
    took_s = time.perf_counter() - started_s
    assert not any(codes), codes
    assert target.stat().st_size == length_bytes
    target.unlink()
    return took_s


def _dcp(subject: Subject, target: Path) -> float:
    """Save the same state by plain PyTorch; return the seconds."""
    writer = dcp.FileSystemWriter(target, thread_count=THREADS_COUNT)
    started_s = time.perf_counter()
    dcp.save(subject.state_dict(), storage_writer=writer, no_dist=True)
    took_s = time.perf_counter() - started_s
    assert (target / ".metadata").exists()
    shutil.rmtree(target)
    return took_s


def _unchanged(bench: _Bench, before: CheckpointId, folder: Path) -> Record:
    """Measure a checkpoint of which only the header is new: copied in the store, all read back."""
    store = open_store(f"file://{folder}")
    plan = replace(bench.plan, earlier=(before,))

    def put(plan: ShardWork) -> float:
        took_s = bench.persist(store, plan)
        store.delete([info.key for info in store.list(bench.folder)])
        return took_s

    copied_s, sent_s = in_turn(lambda: put(plan), lambda: put(bench.plan), runs=RUNS, warm_up=1)
    return faster(
        "persist_dir/unchanged",
        copied_s,
        sent_s,
        peer="the same checkpoint, all of it sent",
        length_bytes=bench.shard.length_bytes,
        note="what is read back of it was written just before, so it lies in the page cache",
        times_min=0,
    )


def _s3(bench: _Bench, url: str) -> Iterator[Record]:
    store = open_store(url)
    bare, minio = Bare(url, THREADS_COUNT), Minio(url, THREADS_COUNT)
    yield from _s3_put(bench, store, bare, minio)
    bench.persist(store)
    yield from _s3_get(bench, store, bare, minio)


def _s3_put(bench: _Bench, store: ObjectStore, bare: Bare, minio: Minio) -> Iterator[Record]:
    slow = "it signs every byte over plain http (SHA-256)"

    def put() -> float:
        took_s = bench.persist(store)
        store.delete([info.key for info in store.list(bench.folder)])
        return took_s

    def peer_put(client: Bare | Minio) -> float:
        started_s = time.perf_counter()
        client.put("bare", bench.path)
        took_s = time.perf_counter() - started_s
        assert store.head("bare").length_bytes == bench.shard.length_bytes
        store.delete(["bare"])
        return took_s

    for name, client, text, share_min in (
        ("persist_s3/bare_client", bare, S3_NOTE, 0.95),
        ("persist_s3/minio", minio, f"{S3_NOTE}; {slow}", 0),
    ):
        ours_s, peer_s = in_turn(put, lambda one=client: peer_put(one), runs=RUNS, warm_up=1)
        yield share(
            name,
            ours_s,
            peer_s,
            peer=f"{client.described}, upload in parts",
            length_bytes=bench.shard.length_bytes,
            note=text,
            share_min=share_min,
        )


def _s3_get(bench: _Bench, store: ObjectStore, bare: Bare, minio: Minio) -> Iterator[Record]:
    folder = CheckpointFolder(store, bench.folder)
    destination = memoryview(bytearray(bench.shard.length_bytes))

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

    def peer_get(client: Bare | Minio) -> float:
        destination[:16] = bytes(16)
        started_s = time.perf_counter()
        client.get(folder.segment_key(bench.shard), destination)
        took_s = time.perf_counter() - started_s
        with bench.path.open("rb") as file:
            assert destination[:16] == file.read(16)
        return took_s

    for name, client, share_min in (
        ("restore_s3/bare_client", bare, 0.9),
        ("restore_s3/minio", minio, 0),
    ):
        ours_s, peer_s = in_turn(get, lambda one=client: peer_get(one), runs=RUNS, warm_up=1)
        yield share(
            name,
            ours_s,
            peer_s,
            peer=f"{client.described}, ranges of 16 MiB",
            length_bytes=bench.shard.length_bytes,
            note=f"{S3_NOTE}; ours verifies every part",
            share_min=share_min,
        )
