"""The database: SQLite in tmpfs with the real statements, a clock of ours, backups and losses.

What is written is shown to the ghosts as it is committed; they judge it. What was read is not read
again while nothing was written to the tables that it is of: one process, one thread, so nobody
else writes.
"""

from __future__ import annotations

import atexit
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Select, Table, UpdateBase
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.sql import visitors
from tests.simulation.ghosts import Ghosts
from tests.simulation.world import World

from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import Inventory
from holdfast.errors import UnavailableError
from holdfast_services.kit.db import (
    Connection,
    make_engine,
    write_transaction,
)
from holdfast_services.metadata import tables
from holdfast_services.metadata.domain.model import Node, Run
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import (
    Catalogue,
    DecodeCache,
    checkpoints,
    holds,
    nodes,
    runs,
)

T = TypeVar("T")


_TABLES = tuple(tables.metadata.tables)
_OF_A_RUN = tuple(name for name in _TABLES if name not in ("events", "pulse", "nodes"))


class Changes:
    """How often each table was written to."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_TABLES, 0)

    def made(self, *names: str) -> int:
        """Return a number that is another one after any of the tables was written to."""
        return sum(self._counts[name] for name in names)

    def add(self, *names: str) -> None:
        """Note that these were written to."""
        for name in names:
            self._counts[name] += 1


class Held:
    """A transaction's connection that remembers answers; it begins when one is not known."""

    def __init__(
        self, begin: Callable[[], Connection], changes: Changes,
        answers: dict[object, tuple[int, Any]],
    ) -> None:  # fmt: skip
        self.dialect = _SQLITE
        self._begin, self._changes, self._answers = begin, changes, answers
        self._connection: Connection | None = None

    def execute(self, statement: Any, values: Any = None) -> Any:
        """See ``Connection.execute``."""
        if not (values or statement in _MADE_ONCE) or "steps" in (values or ()):
            # One that is made anew each time, or whose text depends on how many steps it is about.
            return self._changed(statement, self._there().execute(statement, values))
        values = values or {}
        names = tuple(values if isinstance(values, dict) else values[0])
        direct = _direct(statement, names)
        if direct.columns is None:
            return self._changed(statement, direct.run(self._there(), values))
        if isinstance(statement, UpdateBase):
            rows = direct.rows(self._there(), values)
            if rows:
                self._changes.add(statement.table.name)
            return IteratorResult(direct.columns, iter(rows))
        key, now = (statement, tuple(values.values())), self._changes.made(*direct.tables)
        known = self._answers.get(key)
        if known is None or known[0] != now:
            rows = direct.rows(self._there(), values)
            known = self._answers[key] = (now, rows)
        return IteratorResult(direct.columns, iter(known[1]))

    def _there(self) -> Connection:
        if self._connection is None:
            self._connection = self._begin()
        return self._connection

    def _changed(self, statement: Any, answer: Any) -> Any:
        if isinstance(statement, UpdateBase) and answer.rowcount:
            self._changes.add(statement.table.name)
        return answer


class Direct:
    """A statement as the driver runs it: what a library does around that takes far longer.

    ``columns`` are those of the rows that it returns, None: it changes something and says no more.
    """

    def __init__(self, statement: Any, names: tuple[str, ...]) -> None:
        self._statement = statement
        self._made = statement.compile(dialect=_SQLITE, column_keys=list(names) or None)
        self._text = str(self._made)
        binds = {
            name: _of(bind.type).bind_processor(_SQLITE) for name, bind in self._made.binds.items()
        }
        fixed = self._made.construct_params(_check=False)
        self._binds = [
            (self._made.binds[name].key, fixed[name], binds[name])
            for name in self._made.positiontup
        ]
        self.tables = tuple({o.name for o in visitors.iterate(statement) if isinstance(o, Table)})
        self.columns: SimpleResultMetaData | None = None
        columns = statement.exported_columns
        if columns:
            self.columns = SimpleResultMetaData([column.key for column in columns])
            self._reads = [_of(column.type).result_processor(_SQLITE, None) for column in columns]

    def run(self, connection: Connection, values: Any) -> Any:
        """Return the driver's cursor after it."""
        driver = connection.connection.driver_connection
        assert driver is not None
        try:
            if isinstance(values, dict):
                return driver.execute(self._text, self._row(values))
            return driver.executemany(self._text, [self._row(each) for each in values])
        except sqlite3.IntegrityError:
            return connection.execute(self._statement, values)  # raises what the product meets

    def rows(self, connection: Connection, values: Any) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        return [
            tuple(
                value if read is None else read(value)
                for value, read in zip(row, self._reads, strict=True)
            )
            for row in self.run(connection, values)
        ]

    def _row(self, values: Mapping[str, Any]) -> list[Any]:
        row = []
        for name, fixed, bind in self._binds:
            value = values.get(name, fixed)
            row.append(value if bind is None else bind(value))
        return row


_SQLITE = sqlite.dialect()
_direct = lru_cache(maxsize=1024)(Direct)


def _of(kind: Any) -> Any:
    return kind.dialect_impl(_SQLITE)


def _made_once() -> Iterator[Any]:
    for module in (checkpoints, holds, nodes, runs):
        for made in vars(module).values():
            if isinstance(made, Select | UpdateBase):
                yield made
            elif isinstance(made, dict) and "sqlite" in made:
                yield made["sqlite"]


_MADE_ONCE = frozenset(_made_once())


class Watched(Catalogue):
    """The catalogue with the database's clock taken out and a ghost looking on."""

    clock: Callable[[], float]
    ghosts: Ghosts
    loaded: dict[tuple[int, str], tuple[int, Run | None]]
    listed_nodes: dict[int, tuple[int, Mapping[str, Node]]]
    runs: dict[str, tuple[int, str | None]]
    writes: Changes

    def now_s(self) -> float:
        """Return the simulated database's time."""
        return self.clock()

    def load_run(self, run: str) -> Run | None:
        """Return a run; it is not read again while nothing of it was written."""
        key = (id(self._cache), run)
        known = self.loaded.get(key)
        now = self.writes.made(*_OF_A_RUN)
        if known is None or known[0] != now:
            known = self.loaded[key] = (now, super().load_run(run))
        return known[1]

    def lock_job(self, job: str) -> str | None:
        """Return the job's run; nobody else is there to be locked out."""
        return self.run_of(job)

    def run_of(self, job: str) -> str | None:
        """Return the job's run; it is not read again while no job was written."""
        known, now = self.runs.get(job), self.writes.made("jobs")
        if known is None or known[0] != now:
            known = self.runs[job] = (now, super().run_of(job))
        return known[1]

    def nodes(self) -> Mapping[str, Node]:
        """Return all nodes; they are not read again while none was written."""
        known, now = self.listed_nodes.get(id(self._cache)), self.writes.made("nodes")
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
        self.up = True
        self.clock_off_s = 1_000_000.0
        self.writes_count = 0
        self._changes = Changes()
        self._answers: dict[object, tuple[int, Any]] = {}
        self._loaded: dict[tuple[int, str], tuple[int, Run | None]] = {}
        self._nodes: dict[int, tuple[int, Mapping[str, Node]]] = {}
        self._runs: dict[str, tuple[int, str | None]] = {}
        self._place(_empty())
        with write_transaction(self._at) as connection:  # type: ignore[arg-type] # it has been there for long
            Catalogue(connection, DecodeCache()).beat(0.0, self.clock_off_s, 1.0)

    def close(self) -> None:
        """Give the place back: the next history has its database there."""
        _FREE.append(self._at)

    def lose(self) -> None:
        """An empty database takes the place of this one."""
        self._place(_empty())
        self._ghosts.catalogue_went_back()

    def copy(self) -> bytes:
        """Return the database as it is."""
        return self._at.content()

    def restore(self, copy: bytes) -> None:
        """Put an older database in place."""
        self._place(copy)
        self._ghosts.catalogue_went_back()

    def read(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case on one snapshot."""
        self._check()
        with self._at.reading() as there:
            return use_case(self._catalogue(there, cache))

    def write(self, cache: DecodeCache, use_case: Callable[[Catalogue], T]) -> T:
        """Run a use case in a transaction."""
        self._check()
        self.writes_count += 1
        self._ghosts.forget_changes()
        try:
            with ExitStack() as end:
                begin = partial(write_transaction, self._at)
                answer = use_case(self._catalogue(lambda: end.enter_context(begin()), cache))
        except BaseException:
            self._changes.add(*_TABLES)  # what was read meanwhile was rolled back
            raise
        self._ghosts.judge()
        return answer

    def _check(self) -> None:
        if not self.up:
            raise UnavailableError("the database is away")

    def _catalogue(self, begin: Callable[[], Connection], cache: DecodeCache) -> Watched:
        held = Held(begin, self._changes, self._answers)
        made = Watched(held, cache)  # type: ignore[arg-type]
        made.clock = lambda: self._world.now_s + self.clock_off_s
        made.ghosts = self._ghosts
        made.loaded = self._loaded
        made.listed_nodes, made.runs = self._nodes, self._runs
        made.writes = self._changes
        return made

    def _place(self, content: bytes) -> None:
        self._at.put(content)
        self.writes_count += 1
        self._changes.add(*_TABLES)


class _Place:
    """A file with an engine for it, used by one history after another.

    What an engine has compiled outlives a history, and its one connection each transaction: to
    make them anew is a fifth of the time.
    """

    def __init__(self) -> None:
        folder = _folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.file = folder / "db"
        self.engine = make_engine(f"sqlite:///{self.file}", connections_max=1)
        self._connection: Connection | None = None

    def connect(self) -> AbstractContextManager[Connection]:
        """Lend the connection, as an engine would."""
        return nullcontext(self._there())

    @contextmanager
    def reading(self) -> Iterator[Callable[[], Connection]]:
        """Lend the connection for one snapshot: nobody writes meanwhile."""
        try:
            yield self._there
        finally:
            if self._connection is not None and self._connection.in_transaction():
                self._connection.rollback()

    def _there(self) -> Connection:
        if self._connection is None:
            self._connection = self.engine.connect()
        return self._connection

    def content(self) -> bytes:
        """Return what is in the database."""
        self._close()  # the last connection brings the log into the file
        return self.file.read_bytes()

    def put(self, content: bytes) -> None:
        """Make ``content`` the database, in place of what was there."""
        self._close()
        for file in self.file.parent.glob("db*"):
            file.unlink()
        self.file.write_bytes(content)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.engine.dispose()


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
