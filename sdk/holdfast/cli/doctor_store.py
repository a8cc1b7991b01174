"""What ``doctor`` checks of the object tier: store, queue, worker, objects without use.

``look_at_store`` looks, ``store_checks`` decides and is pure. ``rebuild`` mends the catalogue.
"""

from __future__ import annotations

import re
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from urllib.parse import urlsplit

from holdfast.cli.checks import Check, check
from holdfast.cli.output import Report, counted, waiting
from holdfast.cli.rest import Rest
from holdfast.core.byte_sizes import format_bytes
from holdfast.embedded import Stack, drain
from holdfast.errors import CheckpointError
from holdfast.format.keys import MANIFEST, parse_folder
from holdfast.objectstore import ObjectStore, open_store

TIMEOUT_S = 3.0
OBJECTS_COUNT_MAX = 200_000
ANSWER_BYTES_MAX = 64 << 10
ORPHAN_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The object tier as it answered.

    ``orphan_bytes`` are in folders without a manifest that nobody has written to for
    ``ORPHAN_AGE_S``. ``queue_error`` and ``worker_ready`` are None where it could not be asked.
    """

    url: str
    error: str = ""
    orphan_bytes: int = 0
    uploads_count: int = 0
    queue_error: str | None = None
    waiting_count: int = 0
    worker_ready: bool | None = None


def look_at_store(environ: Mapping[str, str], stack: Stack | None) -> StoreFacts | None:
    """Return what the store of this environment says; None when there is none."""
    url = environ.get("HOLDFAST_STORE") or (stack.store if stack else _store_of_service(environ))
    if not url:
        return None
    error, orphan_bytes, uploads_count = "", 0, 0
    try:
        with closing(open_store(url)) as store:
            store.check()
            orphan_bytes = _orphan_bytes(store, time.time())
            uploads_count = sum(1 for _ in islice(store.open_uploads(), OBJECTS_COUNT_MAX))
    except CheckpointError as cause:
        error = str(cause)
    queue_error, waiting_count, worker = _queue(environ, stack)
    return StoreFacts(
        url=url,
        error=error,
        orphan_bytes=orphan_bytes,
        uploads_count=uploads_count,
        queue_error=queue_error,
        waiting_count=waiting_count,
        worker_ready=worker,
    )


def _store_of_service(environ: Mapping[str, str]) -> str:
    try:
        return str(Rest.find(environ).store()["url"] or "")
    except CheckpointError:
        return ""


def store_checks(facts: StoreFacts | None) -> Iterator[Check]:
    """Yield one check per fact that matters."""
    if facts is None:
        yield check(
            "object store", True, "none is named by HOLDFAST_STORE or by what runs here", ""
        )
        return
    yield check(
        "object store",
        not facts.error,
        facts.error or facts.url,
        "correct HOLDFAST_STORE, the credentials or the store; nothing becomes durable until then",
        bad="fail",
    )
    if facts.queue_error is not None:
        yield check(
            "queue",
            not facts.queue_error,
            facts.queue_error or f"answers, {facts.waiting_count} waiting",
            "start the queue or correct HOLDFAST_QUEUE; nothing becomes durable until then",
            bad="fail",
        )
    if facts.worker_ready is not None:
        yield check(
            "worker",
            facts.worker_ready,
            "ready" if facts.worker_ready else f"none, {facts.waiting_count} waiting",
            "see the log: nothing becomes durable without one",
            bad="fail",
        )
    if not facts.error:
        yield check(
            "orphans",
            not facts.orphan_bytes,
            f"{format_bytes(facts.orphan_bytes)}, {facts.uploads_count} open uploads",
            "left by a drain that ended half-way: the worker removes them by and by",
        )


def rebuild(job: str | None, environ: Mapping[str, str]) -> Report:
    """Have the catalogue take in what the store holds; failed when something was left out."""
    with waiting("rebuilding the catalogue"):
        found = Rest.find(environ).rebuild(job)
    skipped = found["skipped"]
    jobs, checkpoints = _count(found["jobs"]), _count(found["checkpoints"])
    text = [f"found {counted(jobs, 'job')} with {counted(checkpoints, 'checkpoint')}"]
    text += [f"skipped {item['key']}: {item['reason']}" for item in skipped]
    return Report(data=found, text=text, failed=bool(skipped))


def _count(value: object) -> int:
    return len(value) if isinstance(value, list) else int(str(value))


def _orphan_bytes(store: ObjectStore, now_s: float) -> int:
    """Return the bytes in folders without a manifest, as far as a bounded listing goes."""
    bytes_of: dict[str, int] = {}
    newest_s: dict[str, float] = {}
    whole: set[str] = set()
    for entry in islice(store.list(), OBJECTS_COUNT_MAX):
        folder, _, name = entry.key.rpartition("/")
        if parse_folder(f"{folder}/") is None:
            continue
        bytes_of[folder] = bytes_of.get(folder, 0) + entry.length_bytes
        newest_s[folder] = max(newest_s.get(folder, 0.0), entry.modified_s)
        if name == MANIFEST:
            whole.add(folder)
    return sum(
        length_bytes
        for folder, length_bytes in bytes_of.items()
        if folder not in whole and newest_s[folder] < now_s - ORPHAN_AGE_S
    )


def _queue(environ: Mapping[str, str], stack: Stack | None) -> tuple[str | None, int, bool | None]:
    """Return what is wrong with the queue ("" nothing, None unknown), what waits, the worker."""
    if stack is not None:
        try:
            found = drain(stack.home)
        except CheckpointError as error:
            return str(error), 0, None
        return "", found.waiting_count, found.worker_ready
    url = environ.get("HOLDFAST_QUEUE", "")
    return (_ask_queue(url), 0, None) if url else (None, 0, None)


def _ask_queue(url: str) -> str:
    """Return what is wrong with a queue that is asked only whether it is there."""
    kind = url.partition(":")[0]
    try:
        parts = urlsplit(url)
        if parts.scheme == "sqlite":
            path = parts.path.removeprefix("/")
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                database.execute("PRAGMA schema_version")
            return ""
        with socket.create_connection(
            (parts.hostname or "127.0.0.1", parts.port or 6379), TIMEOUT_S
        ) as redis:
            redis.sendall(b"PING\r\nINFO memory\r\nQUIT\r\n")
            with redis.makefile("rb") as stream:
                answer = stream.read(ANSWER_BYTES_MAX)
    except (OSError, ValueError, sqlite3.Error) as cause:
        return f"{kind}: {cause}"
    evicts = re.search(rb"^maxmemory_policy:(allkeys-\w+)", answer, re.MULTILINE)
    host = parts.netloc.rpartition("@")[2]  # without its password
    if evicts and b"\nmaxmemory:0\r" not in answer:
        policy = evicts[1].decode()
        return f"{host} drops keys when it is full: set maxmemory-policy, now {policy}"
    # One that wants a password says so, and is there.
    return "" if answer.startswith((b"+PONG", b"-NOAUTH")) else f"{host} is no Redis"
