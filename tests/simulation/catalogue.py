"""The database: SQLite in tmpfs with the real statements, a clock of ours, backups and losses.

What is written is shown to the ghosts as it is committed; they judge it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
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
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache

T = TypeVar("T")


_TABLE = {"INSERT": 1, "UPDATE": 0, "DELETE": 1}
_APART = frozenset({"events", "pulse"})
_ANY = ("run", "nodes", "jobs")


class Watched(Catalogue):
    """The catalogue with the database's clock taken out and a ghost looking on."""

    clock: Callable[[], float]
    ghosts: Ghosts
    loaded: dict[tuple[int, str], tuple[int, Run | None]]
    listed_nodes: dict[int, tuple[int, Mapping[str, Node]]]
    runs: dict[str, tuple[int, str | None]]
    changes: Counter[str]

    def now_s(self) -> float:
        """Return the simulated database's time."""
        return self.clock()

    def load_run(self, run: str) -> Run | None:
        """Return a run; it is not read again while nothing of it was written."""
        key = (id(self._cache), run)
        known = self.loaded.get(key)
        now = self.changes["run"]
        if known is None or known[0] != now:
            known = self.loaded[key] = (now, super().load_run(run))
        return known[1]

    def lock_job(self, job: str) -> str | None:
        """Return the job's run; nobody else is there to be locked out."""
        return self.run_of(job)

    def run_of(self, job: str) -> str | None:
        """Return the job's run; it is not read again while no job was written."""
        known, now = self.runs.get(job), self.changes["jobs"]
        if known is None or known[0] != now:
            known = self.runs[job] = (now, super().run_of(job))
        return known[1]

    def nodes(self) -> Mapping[str, Node]:
        """Return all nodes; they are not read again while none was written."""
        known, now = self.listed_nodes.get(id(self._cache)), self.changes["nodes"]
        if known is None or known[0] != now:
            known = self.listed_nodes[id(self._cache)] = (now, super().nodes())
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
    """One database that any number of metadata services share. Owns a ``_Place`` until closed."""

    def __init__(self, world: World, ghosts: Ghosts) -> None:
        self._world, self._ghosts = world, ghosts
        self._at = _FREE.pop() if _FREE else _Place()
        event.listen(self._at.engine, "before_cursor_execute", self._look)
        self.up = True
        self.clock_off_s = 1_000_000.0
        self.writes_count = 0
        self._changes: Counter[str] = Counter()
        self._loaded: dict[tuple[int, str], tuple[int, Run | None]] = {}
        self._nodes: dict[int, tuple[int, Mapping[str, Node]]] = {}
        self._runs: dict[str, tuple[int, str | None]] = {}
        self._place(_empty())
        with write_transaction(self._at.engine) as connection:  # it has been there for long
            Catalogue(connection, DecodeCache()).beat(0.0, self.clock_off_s, 1.0)

    def close(self) -> None:
        """Give the place back: the next history has its database there."""
        event.remove(self._at.engine, "before_cursor_execute", self._look)
        self._at.engine.dispose()
        _FREE.append(self._at)

    def lose(self) -> None:
        """An empty database takes the place of this one."""
        self._place(_empty())
        self._ghosts.catalogue_went_back()

    def copy(self) -> bytes:
        """Return the database as it is."""
        self._at.engine.dispose()  # the last connection brings the log into the file
        return self._at.file.read_bytes()

    def restore(self, copy: bytes) -> None:
        """Put an older database in place."""
        self._place(copy)
        self._ghosts.catalogue_went_back()

    def read(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case on one snapshot."""
        self._check()
        with read_transaction(self._at.engine) as connection:
            return use_case(self._catalogue(connection, cache))

    def write(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case in a transaction."""
        self._check()
        self.writes_count += 1
        self._ghosts.forget_changes()
        try:
            with write_transaction(self._at.engine) as connection:
                answer = use_case(self._catalogue(connection, cache))
        except BaseException:
            self._changes.update(_ANY)  # what was read meanwhile was rolled back
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
        made.listed_nodes, made.runs = self._nodes, self._runs
        made.changes = self._changes
        return made

    def _place(self, content: bytes) -> None:
        self._at.put(content)
        self.writes_count += 1
        self._changes.update(_ANY)

    def _look(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        """Count statements that change what a run, or the nodes, are read from."""
        word, _, rest = statement.partition(" ")
        if word in _TABLE and (table := rest.split(None, 2)[_TABLE[word]]) not in _APART:
            self._changes["nodes" if table == "nodes" else "run"] += 1
            self._changes["jobs"] += table == "jobs"


class _Place:
    """A file with an engine for it, used by one history after another.

    What an engine has compiled outlives a history: that is a tenth of the time.
    """

    def __init__(self) -> None:
        folder = _folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.file = folder / "db"
        self.engine = make_engine(f"sqlite:///{self.file}", connections_max=1)

    def put(self, content: bytes) -> None:
        """Make ``content`` the database, in place of what was there."""
        self.engine.dispose()
        for file in self.file.parent.glob("db*"):
            file.unlink()
        self.file.write_bytes(content)


_FREE: list[_Place] = []


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
