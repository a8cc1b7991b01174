"""What a persistence worker is told by its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.ids import node_name
from holdfast.core.units import parse_bytes
from holdfast.errors import InvalidRequestError

PARTS_IN_FLIGHT = 8
PARTS_IN_FLIGHT_MAX = 256
PERSIST_BYTES_PER_S_PER_CORE = 64 << 20
"""Trainers share the machine: a drain may take a share of its cores from them, and no more."""
SCRUB_BYTES_PER_S = 64 << 20
QUEUE_LEASE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``docs/reference/environment.md``. A rate of 0 is no limit."""

    metadata_address: str
    store_url: str
    queue_url: str
    worker: str
    parts_in_flight: int = PARTS_IN_FLIGHT
    persist_bytes_per_s: int
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S
    queue_lease_s: float = QUEUE_LEASE_S
    ready_file: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of ``environ``.

        Raises:
            InvalidRequestError: a variable is missing or not what it should be; names it.
        """
        ready = environ.get("HOLDFAST_READY_FILE", "")
        host = socket.gethostname()
        return cls(
            metadata_address=_required(environ, "HOLDFAST_ADDRESS"),
            store_url=_required(environ, "HOLDFAST_STORE"),
            queue_url=_required(environ, "HOLDFAST_QUEUE"),
            worker=node_name(environ.get("HOLDFAST_WORKER") or f"{host}-{os.getpid()}"),
            parts_in_flight=_parts(environ),
            persist_bytes_per_s=_rate(environ, "HOLDFAST_PERSIST_RATE", _gentle_bytes_per_s()),
            scrub_bytes_per_s=_rate(environ, "HOLDFAST_SCRUB_RATE", SCRUB_BYTES_PER_S),
            queue_lease_s=_lease(environ),
            ready_file=Path(ready) if ready else None,
        )


def _gentle_bytes_per_s() -> int:
    """Return the default pace on this machine."""
    return PERSIST_BYTES_PER_S_PER_CORE * len(os.sched_getaffinity(0))


def _required(environ: Mapping[str, str], key: str) -> str:
    value = environ.get(key, "")
    if not value:
        raise InvalidRequestError(f"{key} is not set")
    return value


def _rate(environ: Mapping[str, str], key: str, otherwise: int) -> int:
    text = environ.get(key, "").removesuffix("/s")
    return parse_bytes(text) if text else otherwise


def _parts(environ: Mapping[str, str]) -> int:
    text = environ.get("HOLDFAST_PERSIST_PARTS") or str(PARTS_IN_FLIGHT)
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) <= PARTS_IN_FLIGHT_MAX:
        raise InvalidRequestError(
            f"HOLDFAST_PERSIST_PARTS={text[:20]!r} is not a number from 1 to {PARTS_IN_FLIGHT_MAX}"
        )
    return int(text)


def _lease(environ: Mapping[str, str]) -> float:
    text = environ.get("HOLDFAST_QUEUE_LEASE_S") or str(QUEUE_LEASE_S)
    try:
        value = float(text)
    except ValueError as cause:
        raise InvalidRequestError(f"HOLDFAST_QUEUE_LEASE_S={text[:20]!r} is no number") from cause
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"HOLDFAST_QUEUE_LEASE_S={text[:20]!r} must be more than 0")
    return value
