"""The database: SQLite in tmpfs with the real statements, a clock of ours, backups and losses.

What is written is shown to the ghosts as it is committed; they judge it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from sqlalchemy import event
from tests.simulation.ghosts import Ghosts
from tests.simulation.world import World

from holdfast.core.facts import Inventory
from holdfast.core.ids import CheckpointId
from holdfast.errors import UnavailableError
from holdfast_services.kit.db import make_engine, read_transaction, write_transaction
from holdfast_services.metadata.domain.model import Run
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache

T = TypeVar("T")


_TABLE = {"INSERT": 1, "UPDATE": 0, "DELETE": 1}
_APART = frozenset({"nodes", "events", "pulse"})


class Watched(Catalogue):
    """The catalogue with the database's clock taken out and a ghost looking on."""

    clock: Callable[[], float]
    ghosts: Ghosts
    loaded: dict[tuple[int, str], tuple[int, Run | None]]
    changes: Callable[[], int]

    def now_s(self) -> float:
        """Return the simulated database's time."""
        return self.clock()

    def load_run(self, run: str) -> Run | None:
        """Return a run; it is not read again while nothing of it was written."""
        key = (id(self._cache), run)
        known = self.loaded.get(key)
        if known is None or known[0] != self.changes():
            known = self.loaded[key] = (self.changes(), super().load_run(run))
        return known[1]

    def save_run(self, before: Run, after: Run) -> None:
        """Write a run, and show it."""
        super().save_run(before, after)
        self.ghosts.saved(before, after, self)

    def put_inventory(self, inventory: Inventory, now_s: float, lease_until_s: float) -> bool:
        """Take an inventory, and show it."""
        taken = super().put_inventory(inventory, now_s, lease_until_s)
        if taken:
            self.ghosts.heard(inventory)
        return taken

    def expire(self, key: CheckpointId, now_s: float) -> bool:
        """Expire a checkpoint, and show it."""
        listed = self.listed(key.run, now_s)
        expired = super().expire(key, now_s)
        if expired:
            self.ghosts.expired(key, listed, self.load_run(key.run))
        return expired


class Database:
    """One database that any number of metadata services share. Owns a folder."""

    def __init__(self, world: World, ghosts: Ghosts) -> None:
        self._world, self._ghosts = world, ghosts
        self._folder = _folder()
        self.up = True
        self.clock_off_s = 1_000_000.0
        self.writes_count = 0
        self._changes_count = 0
        self._loaded: dict[tuple[int, str], tuple[int, Run | None]] = {}
        self._place(_empty())

    def close(self) -> None:
        """Give the folder back."""
        self._engine.dispose()
        shutil.rmtree(self._folder)

    def lose(self) -> None:
        """An empty database takes the place of this one."""
        self._engine.dispose()
        self._place(_empty())
        self._ghosts.catalogue_went_back()

    def copy(self) -> bytes:
        """Return the database as it is."""
        self._engine.dispose()  # the last connection brings the log into the file
        return (self._folder / "db").read_bytes()

    def restore(self, copy: bytes) -> None:
        """Put an older database in place."""
        self._engine.dispose()
        self._place(copy)
        self._ghosts.catalogue_went_back()

    def read(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case on one snapshot."""
        self._check()
        with read_transaction(self._engine) as connection:
            return use_case(self._catalogue(connection, cache))

    def write(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case in a transaction."""
        self._check()
        self.writes_count += 1
        self._ghosts.forget_changes()
        try:
            with write_transaction(self._engine) as connection:
                answer = use_case(self._catalogue(connection, cache))
        except BaseException:
            self._changes_count += 1  # what was read meanwhile was rolled back
            raise
        self._ghosts.judge()
        return answer

    def _check(self) -> None:
        if not self.up:
            raise UnavailableError("the database is away")

    def _catalogue(self, connection: object, cache: DecodeCache) -> Watched:
        made = Watched(connection, cache)  # type: ignore[arg-type]
        made.clock = lambda: self._world.now_s + self.clock_off_s
        made.ghosts = self._ghosts
        made.loaded = self._loaded
        made.changes = lambda: self._changes_count
        return made

    def _place(self, content: bytes) -> None:
        for file in self._folder.glob("db*"):
            file.unlink()
        (self._folder / "db").write_bytes(content)
        self._engine = make_engine(f"sqlite:///{self._folder / 'db'}", connections_max=1)
        event.listen(self._engine, "before_cursor_execute", self._look)
        self.writes_count += 1
        self._changes_count += 1

    def _look(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        """Count statements that change what a run is read from."""
        word, _, rest = statement.partition(" ")
        if word in ("INSERT", "UPDATE", "DELETE") and rest.split()[_TABLE[word]] not in _APART:
            self._changes_count += 1


def _folder() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="hfsim", dir=memory if memory.is_dir() else None))


@cache
def _empty() -> bytes:
    """Return a database with all migrations and nothing else."""
    folder = _folder()
    engine = make_engine(f"sqlite:///{folder / 'db'}", connections_max=1)
    upgrade(engine)
    engine.dispose()
    content = (folder / "db").read_bytes()
    shutil.rmtree(folder)
    return content
