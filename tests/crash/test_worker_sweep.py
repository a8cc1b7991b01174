"""A persistence worker dies at every operation of a drain: nothing, or everything, is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import astuple

import pytest
from tests.crash.operations import Point, common
from tests.e2e.stack import ROOT
from tests.integration.persistence.harness import JOB, Catalogue, Holder, segment, until

from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.verify import verify
from holdfast.errors import NotFoundError
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES
from holdfast.objectstore import open_store
from holdfast_services.kit.queue import open_queue

pytestmark = pytest.mark.timeout(300)
POINTS_MIN = 40
READS = ("head", "get", "read_into", "open_uploads", "parts", "resume")


class Nursery:
    """Forks workers; each drains the one checkpoint into a store of its own."""

    def __init__(self, folder) -> None:
        self.folder = folder
        arena = folder / "arena"
        arena.mkdir(mode=0o700)
        self.holder = Holder("near", arena)
        self.catalogue = Catalogue()
        lengths = (PART_BYTES + 1000, 5000)
        made = [segment(n, rank=rank, world=2) for rank, n in enumerate(lengths)]
        for shard, data in made:
            self.holder.hold(shard, data)
        self.shards = [shard for shard, _ in made]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.workers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={"PATH": os.environ["PATH"],
                 "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}:{ROOT / 'services'}"},
        )  # fmt: skip

    def ask(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def begin(self) -> None:
        """An empty store, and the checkpoint due."""
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.url = (self.folder / "store").as_uri()
        self.store = open_store(self.url, make=True)
        self.checkpoint = self.catalogue.drain(self.shards, [self.holder.peer])

    def spawn(self, point: Point | None = None) -> int:
        """Fork a worker over a fresh queue in which all that is due is offered."""
        for suffix in ("", "-wal", "-shm"):
            (self.folder / f"queue.db{suffix}").unlink(missing_ok=True)
        url = f"sqlite:///{self.folder / 'queue.db'}"
        self.queue = open_queue(url, lease_s=60.0)
        environ = {
            "HOLDFAST_ADDRESS": self.catalogue.address,
            "HOLDFAST_STORE": self.url,
            "HOLDFAST_QUEUE": url,
            "HOLDFAST_PERSIST_PARTS": "2",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
        }
        chosen = astuple(point) if point else None
        return self.ask(folder=str(self.folder), environ=environ, point=chosen)

    def durable(self) -> bool:
        self.queue.offer(sorted(self.catalogue.due()))
        return self.catalogue.durable(self.checkpoint)

    def ended(self, pid: int) -> int | None:
        return self.ask(pid=pid, number=0)

    def count(self) -> list[Point]:
        """Let a worker live; return the operations it made."""
        self.begin()
        pid = self.spawn()
        until(self.durable, "durable")
        self.ask(pid=pid, number=signal.SIGTERM)
        until(lambda: self.ended(pid) is not None, "stopped")
        self.queue.close()
        return [Point(*one) for one in json.loads((self.folder / "counted").read_text())]

    def die(self, point: Point) -> bool:
        """Let a worker die at ``point``; tell whether it did."""
        self.begin()
        pid = self.spawn(point)
        died = []

        def over():
            # Whoever dies at the last words has made it durable.
            finished = self.durable() and point.label not in ("call Durable", "acknowledge")
            if (code := self.ended(pid)) is not None:
                died.append(code == -signal.SIGKILL)
            return died or finished

        until(over, f"dead {point}")
        if not died:
            self.ask(pid=pid, number=signal.SIGKILL)
        self.queue.close()
        return died == [True]

    def finish(self) -> None:
        """Let a second worker do the rest; it is killed once it has."""
        pid = self.spawn()
        until(self.durable, "durable")
        self.ask(pid=pid, number=signal.SIGKILL)
        self.queue.close()

    def torn(self) -> str:
        """Return why what a reader would believe is no whole checkpoint; empty: all is well."""
        folder = CheckpointFolder(self.store, keys.folder(JOB, self.checkpoint))
        try:
            manifest = folder.manifest()
        except NotFoundError:
            return ""
        bad = [verdict.detail for verdict in verify(folder, manifest) if not verdict.ok]
        if tuple(self.shards) != manifest.shards or bad:
            return f"the manifest is there, and {bad}"
        return ""

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()
        self.holder.close()
        self.catalogue.stop()


@pytest.fixture
def nursery(tmp_path):
    made = Nursery(tmp_path)
    yield made
    made.close()


def test_a_worker_that_dies_anywhere_leaves_nothing_or_everything(nursery):
    """P1, G10: SIGKILL before and after every call of store and catalogue while a checkpoint of
    two shards is drained; a second worker then finishes it, and nothing is left over."""
    logs = [nursery.count() for _ in range(2)]
    whole = sorted(entry.key for entry in nursery.store.list())
    # A read changes nothing: after it is before what comes next.
    points = [p for p in common(logs) if not (p.after and p.label.startswith(READS))]
    missed, torn, unlike = [], [], []
    for point in points:
        if not nursery.die(point):
            missed.append(str(point))
        if reason := nursery.torn():
            torn.append(f"{point}: {reason}")
        nursery.finish()
        if reason := nursery.torn():
            torn.append(f"{point}, finished: {reason}")
        left = sorted(entry.key for entry in nursery.store.list())
        left += [upload.key for upload in nursery.store.open_uploads()]
        if left != whole:
            unlike.append(f"{point}: {left}")

    assert [] == torn
    assert [] == unlike
    assert [] == missed, "it did not die there"
    assert {"put manifest.json", "call Durable", "call ShardStored"} <= {p.label for p in points}
    assert len(points) >= POINTS_MIN
