"""A database as a service uses it: one engine, write and read transactions, errors with a meaning.

Postgres through psycopg, or SQLite in WAL mode; nothing above knows which. A write transaction
locks what it reads (``FOR UPDATE`` on Postgres, ``BEGIN IMMEDIATE`` on SQLite); a read
transaction sees one snapshot.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from holdfast.errors import (
    CheckpointError,
    ConflictError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
    UnsupportedFormatError,
)

__all__ = [
    "Connection",
    "Engine",
    "Upsert",
    "insert",
    "is_sqlite",
    "make_engine",
    "migrate",
    "now_s",
    "read_transaction",
    "upsert",
    "write_transaction",
]

CONNECT_S_MAX = 5
STATEMENT_S_MAX = 20
WAL_PAUSE_S = 0.01
LOCK_S_MAX = 10
POOL_WAIT_S_MAX = 10.0
IDLE_S_MAX = 5
"""Between two statements of a transaction: a process that was stopped there lets go of its locks,
sooner than those who wait for them give up."""
SILENT_S_MAX = 15
"""How long either end keeps a connection to the other that answers nothing."""

_POSTGRES_NOW = text("SELECT extract(epoch FROM clock_timestamp())::float8")
_SQLITE_NOW = text("SELECT (julianday('now') - 2440587.5) * 86400.0")
_WRITE = "holdfast_write"
# serialization failure, deadlock, lock not available, unique violation by a racing insert
# and a transaction that was ended because it stood still
_CONFLICTS = frozenset({"40001", "40P01", "55P03", "23505", "25P03"})
_SETTINGS = {
    "statement_timeout": f"{STATEMENT_S_MAX}s",
    "lock_timeout": f"{LOCK_S_MAX}s",
    "idle_in_transaction_session_timeout": f"{IDLE_S_MAX}s",
    "tcp_user_timeout": f"{SILENT_S_MAX}s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
}
_KEEPALIVE = {
    "tcp_user_timeout": SILENT_S_MAX * 1000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def migrate(config: Config) -> None:
    """Run the migrations of ``config`` that its connection's database lacks.

    Raises:
        UnsupportedFormatError: the tables are of a newer release.
    """
    try:
        command.upgrade(config, "head")
    except CommandError as cause:
        raise UnsupportedFormatError(
            f"a newer release has used this database ({cause}): start that one again, or give this "
            "one a backup from before, or an empty database"
        ) from cause


def make_engine(url: str, *, connections_max: int) -> Engine:
    """Return an engine for ``sqlite:////abs/path.db`` or ``postgresql+psycopg://…``.

    Raises:
        InvalidRequestError: the URL is neither.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as cause:  # the latter of a port
        raise InvalidRequestError("HOLDFAST_DATABASE_URL is not a database URL") from cause
    pool: dict[str, Any] = {
        "pool_size": connections_max,
        "max_overflow": 0,
        "pool_timeout": POOL_WAIT_S_MAX,
    }
    if parsed.drivername == "postgresql+psycopg":
        options = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        arguments = {"connect_timeout": CONNECT_S_MAX, "options": options, **_KEEPALIVE}
        return create_engine(parsed, connect_args=arguments, pool_pre_ping=True, **pool)
    if parsed.drivername in ("sqlite", "sqlite+pysqlite") and parsed.database:
        engine = create_engine(parsed, connect_args={"timeout": LOCK_S_MAX}, **pool)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    raise InvalidRequestError(
        f"database {parsed.drivername!r} is not supported: "
        f"use sqlite:////absolute/path.db or postgresql+psycopg://…"
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, not by the driver
    _turn_on_wal(connection)
    # NORMAL loses the last commits when the power goes, but manifests of that time stay: a
    # catalogue behind its bucket gives generations twice (M1).
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _turn_on_wal(connection: Any) -> None:
    """Have readers and the writer not wait for each other; a file keeps it once it is on.

    Of several that turn it on at once SQLite refuses all but one, and waits for nobody.
    """
    deadline_s = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(WAL_PAUSE_S)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """Give a connection in a transaction that commits at the end of the block.

    Raises:
        ConflictError: lost against another transaction; redo it all.
        UnavailableError: the database cannot be reached; a commit may have happened.
    """
    with _meaning(), engine.connect() as bare:
        connection = bare.execution_options(**{_WRITE: True})
        with connection.begin():
            yield connection


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """Give a connection that sees one snapshot; errors as in ``write_transaction``."""
    with _meaning(), engine.connect() as bare:
        level = {} if is_sqlite(bare) else {"isolation_level": "REPEATABLE READ"}
        connection = bare.execution_options(**level)
        with connection.begin():
            yield connection


def is_sqlite(connection: Connection) -> bool:
    """Tell whether the database is SQLite."""
    return connection.dialect.name == "sqlite"


def now_s(connection: Connection) -> float:
    """Return the database's clock: the only one that leases and decisions know."""
    sql = _SQLITE_NOW if is_sqlite(connection) else _POSTGRES_NOW
    return float(connection.execute(sql).scalar_one())


Upsert = Mapping[str, Any]
"""A statement for each dialect."""


def upsert(
    table: Table,
    keys: Sequence[str],
    changes: Callable[[Any], Mapping[str, ColumnElement[Any]]],
    where: Callable[[Any], ColumnElement[bool]] | None = None,
) -> Upsert:
    """Return the statement that inserts a row or, where ``keys`` are there, makes ``changes``.

    Both functions get the row that could not be inserted. Made once for each use, since making
    one costs more than running it.
    """
    made = {}
    for dialect in ("sqlite", "postgresql"):
        sql = insert(table, dialect)
        made[dialect] = sql.on_conflict_do_update(
            index_elements=keys,
            set_=changes(sql.excluded),
            where=where(sql.excluded) if where else None,
        )
    return made


def insert(table: Table, dialect: str) -> Any:
    """Return an ``INSERT`` that can say what to do where the row is there."""
    made = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    return made.execution_options(preserve_rowcount=True)


@contextmanager
def _meaning() -> Iterator[None]:
    try:
        yield
    except DBAPIError as cause:
        raise _translate(cause) from cause
    except PoolTimeoutError as cause:
        raise UnavailableError("no database connection became free in time") from cause


def _translate(error: DBAPIError) -> CheckpointError:
    state = getattr(error.orig, "sqlstate", None)
    text = str(error.orig).splitlines()[0] if str(error.orig) else type(error.orig).__name__
    if state in _CONFLICTS or isinstance(error, IntegrityError) or "is locked" in text:
        return ConflictError(f"transaction lost a race: {text}")
    if isinstance(error, OperationalError) or error.connection_invalidated:
        return UnavailableError(f"database does not answer: {text}")
    return InternalError(f"database refused a statement: {text}")
