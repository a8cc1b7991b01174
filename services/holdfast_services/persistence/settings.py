"""What a persistence worker is told by its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.core.ids import node_name
from holdfast_services.kit.ready import ready_file
from holdfast_services.kit.visitors import names

PARTS_IN_FLIGHT = 8
PARTS_IN_FLIGHT_MAX = 256
PERSIST_BYTES_PER_S_PER_CORE = 64 << 20
"""Trainers share the machine: a drain may take a share of its cores from them, and no more."""
SCRUB_BYTES_PER_S = 64 << 20
QUEUE_LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``docs/reference/environment.md``. A rate of 0 is no limit.

    ``metrics_listen`` empty: no ``/metrics``; ``rest_names``: what browsers know it by.
    """

    metadata_address: str
    store_url: str
    queue_url: str
    worker: str
    parts_in_flight: int = PARTS_IN_FLIGHT
    persist_bytes_per_s: int
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S
    queue_lease_s: float = QUEUE_LEASE_S
    ready_file: Path | None = None
    metrics_listen: str = ""
    rest_names: frozenset[str] = frozenset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of ``environ``.

        Raises:
            InvalidRequestError: a variable is missing or not what it should be; names it.
        """
        host = socket.gethostname()
        return cls(
            metadata_address=env.required(
                environ, "HOLDFAST_ADDRESS", "host:port of the metadata service"
            ),
            store_url=env.required(
                environ, "HOLDFAST_STORE", "the URL of the object store, file: or s3:"
            ),
            queue_url=env.required(environ, "HOLDFAST_QUEUE", "the URL of the work queue"),
            worker=node_name(environ.get("HOLDFAST_WORKER") or f"{host}-{os.getpid()}"),
            parts_in_flight=env.number(
                environ,
                "HOLDFAST_PERSIST_PARTS",
                PARTS_IN_FLIGHT,
                low=1,
                high=PARTS_IN_FLIGHT_MAX,
            ),
            persist_bytes_per_s=env.rate(environ, "HOLDFAST_PERSIST_RATE", _gentle_bytes_per_s()),
            scrub_bytes_per_s=env.rate(environ, "HOLDFAST_SCRUB_RATE", SCRUB_BYTES_PER_S),
            queue_lease_s=env.seconds(environ, "HOLDFAST_QUEUE_LEASE_S", QUEUE_LEASE_S),
            ready_file=ready_file(environ),
            metrics_listen=env.listen(environ, "HOLDFAST_METRICS_LISTEN"),
            rest_names=names(environ.get("HOLDFAST_REST_NAMES", "")),
        )


def _gentle_bytes_per_s() -> int:
    """Return the default pace on this machine."""
    return PERSIST_BYTES_PER_S_PER_CORE * len(os.sched_getaffinity(0))
