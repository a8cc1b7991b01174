"""A queue in one SQLite file that the processes of one machine share.

Each change is one transaction that locks the file (``BEGIN IMMEDIATE``), so two claimers never
see the same item free. Leases and delays run by the clock of SQLite, which is this machine's.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from holdfast.errors import UnavailableError
from holdfast_services.kit.queue import Claim, check_items

FAR_S = 600.0
"""Nothing is due later than so long from now: what seems to be was noted by a clock that has since
stepped back, and is due at once. Longer delays are cut."""
LOCK_S_MAX = 10.0
POLL_S = 0.1

# due_s: from then on anybody may claim it. token: that of its claim, NULL while it is nobody's.
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS items (
        item TEXT PRIMARY KEY,
        turn INTEGER NOT NULL,
        due_s REAL NOT NULL,
        token TEXT,
        worker TEXT,
        deliveries INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE INDEX IF NOT EXISTS items_by_turn ON items (turn)",
    "CREATE TABLE IF NOT EXISTS queue (only_row INTEGER PRIMARY KEY, epoch TEXT NOT NULL)",
)
_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
_LAST = "(SELECT coalesce(max(turn), 0) + 1 FROM items)"
_LOOK = "BEGIN"  # a transaction that only reads locks nobody out

_WAITING = "SELECT count(*) FROM items WHERE token IS NULL"
_COUNT = "SELECT count(*) FROM items WHERE substr(item, 1, ?) = ?"

# Each runs inside a transaction that has the file to itself.
_OFFER = f"INSERT OR IGNORE INTO items (item, turn, due_s) VALUES (?, {_LAST}, {_NOW})"  # noqa: S608
_IS_DUE = f"(due_s <= {_NOW} OR due_s > {_NOW} + {FAR_S})"
_ANY_DUE = f"SELECT 1 FROM items WHERE {_IS_DUE} LIMIT 1"  # noqa: S608
_DUE = f"""SELECT item FROM items WHERE {_IS_DUE}
    ORDER BY token IS NULL, turn LIMIT ?"""  # noqa: S608
_CLAIM = f"""UPDATE items SET token = ?, worker = ?, due_s = {_NOW} + ?,
    deliveries = deliveries + 1 WHERE item = ? RETURNING deliveries"""  # noqa: S608
_HEARTBEAT = f"UPDATE items SET due_s = {_NOW} + ? WHERE item = ? AND token = ?"  # noqa: S608
_ACKNOWLEDGE = "DELETE FROM items WHERE item = ? AND token = ?"
_RELEASE = f"""UPDATE items SET token = NULL, worker = NULL, due_s = {_NOW} + ?, turn = {_LAST}
    WHERE item = ? AND token = ?"""  # noqa: S608


class SqliteQueue:
    """The promises of ``Queue`` over the file at ``path``; the first to come makes it."""

    def __init__(self, path: str, *, lease_s: float) -> None:
        self._path = path
        self._lease_s = min(lease_s, FAR_S)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def epoch(self) -> str:
        """As in ``Queue``."""
        with self._transaction(_LOOK) as connection:
            return str(connection.execute("SELECT epoch FROM queue").fetchone()[0])

    def offer(self, items: Sequence[str]) -> int:
        """As in ``Queue``."""
        check_items(items)
        with self._transaction() as connection:
            return sum(connection.execute(_OFFER, (item,)).rowcount for item in items)

    def claim(self, worker: str, *, count_max: int, wait_s: float) -> Sequence[Claim]:
        """As in ``Queue``."""
        deadline_s = time.monotonic() + wait_s
        while True:
            claims = self._take(worker, count_max)
            left_s = deadline_s - time.monotonic()
            if claims or left_s <= 0:
                return claims
            time.sleep(min(left_s, POLL_S))

    def heartbeat(self, worker: str, claims: Sequence[Claim]) -> Sequence[Claim]:
        """As in ``Queue``."""
        del worker
        with self._transaction() as connection:
            return [
                claim
                for claim in claims
                if not connection.execute(
                    _HEARTBEAT, (self._lease_s, claim.item, claim.token)
                ).rowcount
            ]

    def acknowledge(self, claim: Claim) -> None:
        """As in ``Queue``."""
        with self._transaction() as connection:
            connection.execute(_ACKNOWLEDGE, (claim.item, claim.token))

    def release(self, claim: Claim, *, delay_s: float) -> None:
        """As in ``Queue``."""
        with self._transaction() as connection:
            connection.execute(_RELEASE, (min(delay_s, FAR_S), claim.item, claim.token))

    def waiting_count(self) -> int:
        """As in ``Queue``."""
        with self._transaction(_LOOK) as connection:
            return int(connection.execute(_WAITING).fetchone()[0])

    def items_count(self, prefix: str = "") -> int:
        """As in ``Queue``."""
        with self._transaction(_LOOK) as connection:
            return int(connection.execute(_COUNT, (len(prefix), prefix)).fetchone()[0])

    def close(self) -> None:
        """As in ``Queue``."""
        with self._lock:
            self._drop()

    def _take(self, worker: str, count_max: int) -> Sequence[Claim]:
        # Most questions find nothing.
        with self._transaction(_LOOK) as connection:
            if connection.execute(_ANY_DUE).fetchone() is None:
                return []
        token = secrets.token_hex(8)
        with self._transaction() as connection:
            claims = []
            for (item,) in connection.execute(_DUE, (count_max,)).fetchall():
                row = connection.execute(_CLAIM, (token, worker, self._lease_s, item)).fetchone()
                claims.append(Claim(item=item, token=token, deliveries=int(row[0])))
            return claims

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._lock, ExitStack() as undo:
            # Whatever happens: a transaction left open would lock everybody out of the file.
            undo.callback(self._drop)  # rolls back; the next call opens the file anew
            try:
                if self._connection is None:
                    self._connection = _opened(self._path)
                self._connection.execute(begin)
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as cause:
                raise UnavailableError(
                    f"queue does not answer: {cause}", file=self._path
                ) from cause
            undo.pop_all()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _opened(path: str) -> sqlite3.Connection:
    """Return a connection to the file, made if it was absent."""
    connection = sqlite3.connect(
        path, timeout=LOCK_S_MAX, isolation_level=None, check_same_thread=False
    )
    with ExitStack() as undo:
        undo.callback(connection.close)
        _prepare(connection)
        undo.pop_all()
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    deadline_s = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            # Several make the file at once: this one statement does not wait for the lock itself.
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(POLL_S)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute("INSERT OR IGNORE INTO queue VALUES (1, ?)", (secrets.token_hex(8),))
    connection.execute("COMMIT")
