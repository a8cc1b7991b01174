"""From the report that completes a round of 64 launchers to the last of them that hears of it.

The metadata service runs alone, over SQLite and over Postgres. The launchers are calls over gRPC,
a channel for each as from 64 agents, all in one process beside it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.catalogue import running_metadata
from tests.bench.harness import RUNS_MIN, Record
from tests.servers.postgres import running_postgres

from holdfast.core.rounds import LauncherReport, LaunchRequest, LaunchView, Terms
from holdfast_services.agent.clients import MetadataClient

NAMES = ("launch/64", "launch/64_postgres")
LAUNCHERS = 64
MS_MAX = 50.0
LEASE_S = "60"
WAIT_S = 10.0
SETTLE_S = 0.5
"""Before the last report: all others wait by then."""


def measure(*, quick: bool) -> Iterator[Record]:
    """Yield a record for each database."""
    count = 1 if quick else 2 * RUNS_MIN
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        url = f"sqlite:///{Path(name) / 'metadata.db'}"
        yield _measured("launch/64", Path(name), url, "SQLite", count)
    with tempfile.TemporaryDirectory(prefix="hf-") as name, running_postgres() as server:
        url = server.url(server.create())
        yield _measured("launch/64_postgres", Path(name), url, "Postgres, no fsync", count)


def _measured(name: str, folder: Path, url: str, database: str, count: int) -> Record:
    with running_metadata(folder, url, HOLDFAST_NODE_LEASE_S=LEASE_S) as ready:
        times_s = asyncio.run(_times_s(ready["address"], 1 + count))[1:]
    value_ms = statistics.median(times_s) * 1e3
    return Record(
        name=name,
        value=value_ms,
        unit="ms",
        peer="",
        peer_value=None,
        ratio=value_ms / MS_MAX,
        bytes=0,
        note=f"{LAUNCHERS} launchers, {database}; until the last has its place; "
        f"{min(times_s) * 1e3:.3g}..{max(times_s) * 1e3:.3g} ms, n={count}",
        target=f"<= {MS_MAX:g} ms",
        met=value_ms <= MS_MAX,
    )


async def _times_s(address: str, count: int) -> list[float]:
    clients = [MetadataClient(address) for _ in range(LAUNCHERS)]
    try:
        return [await _time_s(clients, f"bench-{number}") for number in range(count)]
    finally:
        for client in clients:
            await client.close()


async def _time_s(clients: list[MetadataClient], job: str) -> float:
    """Have all but one launcher wait; return the seconds from the last one's report on."""

    async def ask(number: int, sequence: int, version: str = "", **what: object) -> LaunchView:
        report = LauncherReport(
            launcher=f"{number:032x}", sequence=sequence, job=job, port=7000 + number,
            terms=Terms(command="c", nodes_min=LAUNCHERS, nodes_max=LAUNCHERS), **what,
        )  # type: ignore[arg-type]  # fmt: skip
        wait_s = WAIT_S if version else 0.0
        node = f"n{number}"
        request = LaunchRequest(
            report=report, version=version, wait_s=wait_s, node=node, address=node
        )
        return await clients[number].launch(request)

    first = range(LAUNCHERS - 1)
    await asyncio.gather(*(ask(number, 1) for number in first))
    views = await asyncio.gather(*(ask(number, 2) for number in first))
    waiting = [asyncio.create_task(ask(n, 2, views[n].version)) for n in first]
    await asyncio.sleep(SETTLE_S)
    began_s = time.perf_counter()
    told = await asyncio.gather(ask(LAUNCHERS - 1, 1), *waiting)
    took_s = time.perf_counter() - began_s
    assert len({view.place.nonce for view in told if view.place}) == 1
    assert all(view.place for view in told), "each has its place"
    await asyncio.gather(*(ask(number, 3, left=True) for number in range(LAUNCHERS)))
    return took_s
