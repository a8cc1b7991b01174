"""The object store and the queue, each the real one in memory or tmpfs, with trouble in front."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.simulation.checks import Broken, name
from tests.simulation.ghosts import Ghosts
from tests.simulation.segments import flipped, root
from tests.simulation.world import World

from holdfast.core.ids import CheckpointId
from holdfast.errors import OutcomeUnknownError, UnavailableError
from holdfast.format import keys
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.kit.queue.sqlite import SqliteQueue

QUEUE_LEASE_S = 4.0
FAULT_CHANCE = 0.25


class Bucket:
    """A ``MemoryStore`` that can be away, or fail every now and then before or after it did it.

    Passes as an ``ObjectStore``: what is not named here goes through as it is, after the trouble.
    """

    def __init__(self, world: World, ghosts: Ghosts) -> None:
        self._world, self._ghosts = world, ghosts
        self.inside = MemoryStore()
        self.down = False
        self.faulty = False
        self.flipped: set[str] = set()

    def __getattr__(self, method: str) -> Any:
        inner = getattr(self.inside, method)
        if not callable(inner):
            return inner

        def call(*args: Any, **named: Any) -> Any:
            self._trouble(f"{method} was refused: 503")
            answer = inner(*args, **named)
            self._trouble(f"the answer to {method} was lost")
            return answer

        return call

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """As ``ObjectStore.put``; looks at every manifest that is written."""
        self._trouble("put was refused: 503")
        before = self.inside.get(key, length_bytes_max=1 << 20) if self._has(key) else data
        etag = self.inside.put(key, data, if_absent=if_absent)
        if keys.parse_rollback(key) is not None:
            self._ghosts.left.record()
        if key.endswith(f"/{keys.MANIFEST}"):
            if before != data:
                raise Broken(f"P1: {key} is written over by another manifest")
            self._written(key)
        try:
            self._trouble("the answer to put was lost")
        except UnavailableError as error:
            if if_absent:
                raise OutcomeUnknownError(error.message) from error
            raise
        return etag

    def delete(self, names: Iterator[str]) -> None:
        """As ``ObjectStore.delete``, one after the other: the first may be gone when it fails."""
        for key in names:
            self._trouble("delete was refused: 503")
            self._deleted(key)
            self.inside.delete([key])

    def flip(self, rng: Any) -> str | None:
        """Turn a bit of some segment; return its key, None: there is none."""
        found = [o.key for o in self.inside.list() if o.key.endswith(keys.SEGMENT_SUFFIX)]
        if not found:
            return None
        key = rng.choice(found)
        self.inside.put(key, flipped(self.inside.get(key, length_bytes_max=1 << 20)))
        self.flipped.add(key)
        self._ghosts.destroyed()
        return str(key)

    def _has(self, key: str) -> bool:
        return any(o.key == key for o in self.inside.list(key))

    def _trouble(self, what: str) -> None:
        if self.down:
            raise UnavailableError("the object store does not answer")
        if self.faulty and self._world.rng.random() < FAULT_CHANCE:
            raise UnavailableError(what)

    def _written(self, key: str) -> None:
        """P1: a manifest lists what is there."""
        place = keys.parse_folder(key)
        assert place is not None
        self._ghosts.manifests.setdefault(place.checkpoint, self._world.now_s)
        folder = keys.folder(place.job, place.checkpoint)
        size = self._ghosts.world_sizes[place.checkpoint]
        there = {o.key for o in self.inside.list(folder) if o.key.endswith(keys.SEGMENT_SUFFIX)}
        if len(there) != size:
            raise Broken(f"P1: the manifest of {name(place.checkpoint)} was written beside "
                         f"{len(there)} of {size} shards")  # fmt: skip
        for one in sorted(there - self.flipped):
            if not self._right(one, place.checkpoint):
                raise Broken(f"P3: {one} has other bytes than were sealed")

    def _right(self, key: str, checkpoint: CheckpointId) -> bool:
        digest = root(self.inside.get(key, length_bytes_max=1 << 20))
        ranks = range(self._ghosts.world_sizes[checkpoint])
        return any(digest in self._ghosts.digests[checkpoint, rank] for rank in ranks)

    def _deleted(self, key: str) -> None:
        """4.7: the manifest goes first, so that nobody believes what is being deleted."""
        place = keys.parse_folder(key)
        if place is None or not key.endswith(keys.SEGMENT_SUFFIX):
            return
        manifest = keys.manifest_key(place.job, place.checkpoint)
        if self._has(manifest):
            raise Broken(f"P1: {key} is deleted, and its manifest stands")
        self._ghosts.gone.add(place.checkpoint)
        self._ghosts.destroyed()


class Queue(SqliteQueue):
    """The queue of one machine, by a clock of ours."""

    def __init__(self, world: World) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hfsim", dir=_memory()))
        super().__init__(str(self._folder / "queue"), lease_s=QUEUE_LEASE_S)
        self._world = world
        self.down = False
        self.clock_off_s = 1e6

    def forget(self) -> None:
        """Lose everything."""
        self._drop()
        for file in self._folder.iterdir():
            file.unlink()

    def close(self) -> None:
        """Give the folder back."""
        super().close()
        shutil.rmtree(self._folder)

    def _julian_day(self, _now: str) -> float:
        return (self._world.now_s + self.clock_off_s) / 86400.0 + 2440587.5

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        if self.down:
            raise UnavailableError("the queue does not answer")
        with super()._transaction(begin) as connection:
            connection.create_function("julianday", 1, self._julian_day)
            yield connection


def _memory() -> Path | None:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None
