"""Drives the catalogue for ``test_metadata_sweep``: every command in a process of its own.

The driver itself stays without threads and connections, so that it may fork. A command makes one
call of ``CALLS`` on the service over a SQLite file, with ``Sweep`` around every statement and
commit, as `python -m holdfast_services.metadata` would do it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import sqlite3
import sys
import traceback
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from sqlalchemy import event
from tests import said
from tests.crash.operations import Point, Sweep
from tests.integration.metadata.service import Service
from tests.said import rank_status, tcp

from holdfast.core.ids import CheckpointId, Generation, RunId, ShardId, Step
from holdfast.core.inventory import HeldShard, HeldState, Inventory, Peer
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.shard import Shard
from holdfast_services.kit.db import make_engine
from holdfast_services.metadata.domain.attempt_start import first_run
from holdfast_services.metadata.domain.attempts import Registration
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.usecases import workers

JOB = "sweep"
RUN = first_run(JOB)
NODES = ("a", "b")
LIMITS = Limits(node_lease_s=600.0, decide_wait_s=600.0, object_tier=True)
STEP = 10
KEY = CheckpointId(RunId(RUN), Step(STEP), Generation(1))
PULSE_AGE_S = 100.0
TIME = re.compile(r'("(?:\w+_at_s|\w+_until_s|heard_s|since_s)":) \d[\d.]*')


def registration(rank: int, nonce: bytes) -> Registration:
    """Return the wish of one rank of two."""
    return said.registration(
        job=JOB, nonce=nonce, launcher="L", holder="h", takeover=False,
        rank=rank, world_size=2, node=NODES[rank], replicas=1, persist=PersistRule(steps=STEP),
    )  # fmt: skip


def inventory(
    rank: int, sequence: int, generation: int, *, holds: bool, ready: int = 0
) -> Inventory:
    """Return what a node reports; with ``holds`` both shards of the step."""
    held = [
        HeldShard(
            shard=Shard(
                id=ShardId(RUN, STEP, 1, owner), job=JOB, world_size=2, plan_hash="plan",
                length_bytes=100, root_digest=bytes([owner]) * 16,
            ),
            state=HeldState.SEALED, owner=NODES[owner], slot_incarnation=1,
        )
        for owner in range(2)
    ]  # fmt: skip
    status = rank_status(job=JOB, run=RUN, generation=generation, rank=rank, ready_decision=ready)
    name = NODES[rank]
    return Inventory(
        node=Peer(node=name, rpc_address=f"{name}:1", endpoints=tcp(f"{name}:2")),
        incarnation=1, sequence=sequence, budget_bytes=1 << 30, used_bytes=200,
        shards=tuple(held) if holds else (), ranks=(status,),
    )  # fmt: skip


def lies_there(service: Service, rank: int) -> Any:
    """Say that a rank's shard lies in the object store."""
    held = inventory(rank, 0, 1, holds=True).shards
    shard = next(item.shard for item in held if item.shard.id.rank == rank)
    return service.change(lambda c: workers.shard_stored(c, shard))


CALLS: tuple[tuple[str, Callable[[Service], Any]], ...] = (
    ("register a", lambda s: s.register(registration(0, b"first"))),
    ("register b", lambda s: s.register(registration(1, b"first"))),
    ("report a", lambda s: s.report(inventory(0, 1, 1, holds=False))),
    ("begin fresh", lambda s: s.report(inventory(1, 1, 1, holds=False))),
    ("report shards of a", lambda s: s.report(inventory(0, 2, 1, holds=True))),
    ("commit", lambda s: s.report(inventory(1, 2, 1, holds=True))),
    ("shard of a stored", lambda s: lies_there(s, 0)),
    ("last shard stored", lambda s: lies_there(s, 1)),
    ("durable", lambda s: s.change(lambda c: workers.durable(c, KEY, b"m" * 16, LIMITS))),
    ("new generation", lambda s: s.register(registration(0, b"second"))),
    ("last rank", lambda s: s.register(registration(1, b"second"))),
    ("report anew", lambda s: s.report(inventory(0, 3, 2, holds=True))),
    ("propose", lambda s: s.report(inventory(1, 3, 2, holds=True))),
    ("ready a", lambda s: s.report(inventory(0, 4, 2, holds=True, ready=2))),
    ("confirm", lambda s: s.report(inventory(1, 4, 2, holds=True, ready=2))),
)


async def make_call(path: Path, number: int, sweep: Sweep) -> None:
    """Make one call on a service of its own over the database."""
    engine = make_engine(f"sqlite:///{path}", connections_max=4)
    if number == 0:
        upgrade(engine)
    watch(engine, sweep)
    service = Service(engine, LIMITS)
    sweep.arm()
    try:
        await CALLS[number][1](service)
    finally:
        sweep.armed = False
        await service.stop()
        engine.dispose()


def watch(engine: Any, sweep: Sweep) -> None:
    """Make each statement and each commit of the engine an operation."""
    running: dict[int, Point | None] = {}

    def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        running[id(cursor)] = sweep.begin(statement.split("\n", maxsplit=1)[0][:60])

    def after(connection: Any, cursor: Any, *_: Any) -> None:
        sweep.end(running.pop(id(cursor), None))

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    sweep.wrap(engine.dialect, "do_commit", "commit")


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of the catalogue without their times."""
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        names = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if not row[0].startswith(("sqlite", "alembic"))
        ]
        found = {
            name: sorted(
                (
                    {
                        key: value.hex() if isinstance(value, bytes) else timeless(value)
                        for key, value in dict(row).items()
                        if not key.endswith(("at_s", "_until_s"))
                    }
                    for row in connection.execute(f"SELECT * FROM {name}")
                    if name != "pulse"
                ),
                key=str,
            )
            for name in names
        }
    connection.close()
    return found


def timeless(value: Any) -> Any:
    """Return a value; a record without the times in it, which tell how fast the machine is."""
    return TIME.sub(r"\1 0", value) if isinstance(value, str) else value


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the wait status of a child that did ``work``, and what it returned."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    return status, json.loads(data) if data else None


def call(path: Path, number: int, point: Point | None = None) -> tuple[int, list[Point]]:
    """Make a call in a child; return its wait status and the operations it made."""

    def work() -> list[tuple[Any, ...]]:
        sweep = Sweep(point)
        asyncio.run(make_call(path, number, sweep))
        return [astuple(reached) for reached in sweep.log]

    status, log = forked(work)
    return status, [Point(*reached) for reached in log or ()]


def copied(source: Path, target: Path) -> Path:
    """Copy a database with its log."""
    for suffix in ("", "-wal", "-shm"):
        there = Path(f"{target}{suffix}")
        there.unlink(missing_ok=True)
        if Path(f"{source}{suffix}").exists():
            shutil.copyfile(f"{source}{suffix}", there)
    return target


def age(path: Path) -> None:
    """Make the pulse old: then every call renews the leases first, whatever the hour."""
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE pulse SET at_s = at_s - {PULSE_AGE_S}")
    connection.close()


def sweep_call(folder: Path, wanted: str) -> list[dict[str, Any]]:
    """Crash the call ``wanted`` at every point; return what was found at each."""
    gc.freeze()  # a child's search for garbage would copy all pages with objects
    base, scratch = folder / "base.db", folder / "scratch.db"
    number = [name for name, _ in CALLS].index(wanted)
    for earlier in range(number):
        status, _ = call(base, earlier)
        assert status == 0, CALLS[earlier][0]
    if base.exists():
        age(base)
    nothing = rows(base)
    status, log = call(copied(base, scratch), number)
    assert status == 0, wanted
    everything = rows(scratch)
    assert nothing != everything, f"{wanted} changes nothing"
    found = []
    for point in log:
        if point.after and point.label.startswith("SELECT"):
            continue  # it changed nothing: this is before what comes next
        copied(base, scratch)
        status, _ = call(scratch, number, point)
        left = rows(scratch)
        again, _ = call(scratch, number)
        found.append(
            {
                "point": str(point),
                "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9,
                "left": "nothing" if left == nothing else difference(left, everything),
                "repeated": again == 0,
                "after_repeat": difference(rows(scratch), everything),
                "generations": [row["generation"] for row in left["runs"]],
            }
        )
    return found


def difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Return "everything" if equal, else the tables that are not."""
    apart = [name for name in right if left.get(name) != right[name]]
    return "everything" if not apart else f"differs in {apart}: {left} is not {right}"


if __name__ == "__main__":
    print(json.dumps(sweep_call(Path(sys.argv[1]), sys.argv[2])))
