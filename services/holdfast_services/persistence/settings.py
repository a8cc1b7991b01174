"""Settings of a persistence worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.core import env
from holdfast_services.kit.settings import (
    NEEDED,
    READY,
    MetricsSettings,
    load,
    node_called,
    path,
    required,
    setting,
)

PARTS_IN_FLIGHT = 8
PARTS_IN_FLIGHT_MAX = 256
PERSIST_BYTES_PER_S_PER_CORE = 64 << 20
"""Trainers share the machine: a drain may take a share of its cores from them, and no more."""
SCRUB_BYTES_PER_S = 64 << 20
QUEUE_LEASE_S = 30.0


def _process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _persist_rate(environ: Mapping[str, str], name: str) -> int:
    """Read the pace; by default a gentle one on this machine."""
    gentle = PERSIST_BYTES_PER_S_PER_CORE * len(os.sched_getaffinity(0))
    return env.rate(environ, name, gentle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(MetricsSettings):
    """A rate of 0 is no limit.

    ``metrics_listen`` empty: no ``/metrics``; ``rest_names``: what browsers know it by.
    """

    metadata_address: str = setting(
        "HOLDFAST_ADDRESS",
        required("host:port of the metadata service"),
        "metadata service, `host:port`",
        NEEDED,
    )
    store_url: str = setting(
        "HOLDFAST_STORE",
        required("the URL of the object store, file: or s3:"),
        "the object store to which the worker uploads, as for agents",
        NEEDED,
    )
    queue_url: str = setting(
        "HOLDFAST_QUEUE",
        required("the URL of the work queue"),
        "the queue, the same as the metadata service's: `redis://host:port/db` or "
        "`sqlite:////abs/queue.db`",
        NEEDED,
    )
    worker: str = setting(
        "HOLDFAST_WORKER",
        node_called(_process),
        "unique name of this worker",
        "host name and process id",
    )
    parts_in_flight: int = setting(
        "HOLDFAST_PERSIST_PARTS",
        partial(env.number, otherwise=PARTS_IN_FLIGHT, low=1, high=PARTS_IN_FLIGHT_MAX),
        "most parts of 16 MiB that the worker transfers at the same time; this also bounds its "
        "memory",
        f"{PARTS_IN_FLIGHT}",
    )
    persist_bytes_per_s: int = setting(
        "HOLDFAST_PERSIST_RATE",
        _persist_rate,
        "most bytes per second that the worker uploads and reads back to verify them, such as "
        "`1GiB`; 0: no limit. With the default, training keeps [97 % of its speed]"
        "(../explanation/figures.md) during an upload; raise it where workers have machines of "
        "their own",
        "64 MiB for each core",
    )
    scrub_bytes_per_s: int = setting(
        "HOLDFAST_SCRUB_RATE",
        partial(env.rate, otherwise=SCRUB_BYTES_PER_S),
        "most bytes per second that the worker reads to check stored checkpoints; 0: no limit",
        "`64MiB`",
    )
    queue_lease_s: float = setting(
        "HOLDFAST_QUEUE_LEASE_S",
        partial(env.seconds, otherwise=QUEUE_LEASE_S),
        "seconds without a sign of life after which another worker takes a task over; the same "
        "value for all workers",
        f"{QUEUE_LEASE_S:.0f}",
    )
    ready_file: Path | None = setting("HOLDFAST_READY_FILE", path, READY)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of ``environ``, and of the file that it names.

        Raises:
            InvalidRequestError: a setting is missing or not what it should be; names it.
        """
        return load(cls, environ, "persistence")
