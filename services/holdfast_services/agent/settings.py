"""What an agent is told by its environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import node_name
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.free_memory import free_bytes
from holdfast_services.kit.ready import ready_file
from holdfast_services.kit.visitors import names

BUDGET_SHARE = 0.5
REPLICATE_BYTES_PER_S_MIN = 1 << 20
"""Slower than this a part of 16 MiB takes longer than steps that are saved are apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``docs/reference/environment.md``. ``budget_bytes`` 0: choose by free space.

    ``store`` empty: no object tier. It is opened when a restore first needs it. ``rdma_devices``
    empty: all that there are; None: no RDMA. ``replicate_bytes_per_s`` 0: no limit.
    ``metrics_listen`` empty: no ``/metrics``; ``rest_names``: what browsers know it by.
    """

    node: str
    metadata_address: str
    agent_socket: Path
    arena: Path
    budget_bytes: int
    listen_host: str
    rpc_port: int
    data_port: int
    domain: str
    ready_file: Path | None
    store: str = ""
    rdma_devices: tuple[str, ...] | None = ()
    rdma_port: int = 0
    replicate_bytes_per_s: int = 0
    metrics_listen: str = ""
    rest_names: frozenset[str] = frozenset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of ``environ``.

        Raises:
            InvalidRequestError: a variable is missing or not what it should be; names it.
        """
        return cls(
            node=node_name(environ.get("HOLDFAST_NODE") or socket.gethostname()),
            metadata_address=env.required(
                environ, "HOLDFAST_ADDRESS", "host:port of the metadata service"
            ),
            agent_socket=Path(
                env.required(environ, "HOLDFAST_AGENT", "the path of its socket")
            ).absolute(),
            arena=Path(env.required(environ, "HOLDFAST_ARENA", "a folder in memory")).absolute(),
            budget_bytes=env.size(environ, "HOLDFAST_BUDGET", 0),
            listen_host=environ.get("HOLDFAST_LISTEN_HOST", "127.0.0.1"),
            rpc_port=env.port(environ, "HOLDFAST_RPC_PORT"),
            data_port=env.port(environ, "HOLDFAST_DATA_PORT"),
            domain=environ.get("HOLDFAST_DOMAIN", ""),
            ready_file=ready_file(environ),
            store=environ.get("HOLDFAST_STORE", ""),
            rdma_devices=_rdma_devices(environ.get("HOLDFAST_RDMA", "auto")),
            rdma_port=env.port(environ, "HOLDFAST_RDMA_PORT"),
            replicate_bytes_per_s=_replicate_bytes_per_s(environ),
            metrics_listen=env.listen(environ, "HOLDFAST_METRICS_LISTEN"),
            rest_names=names(environ.get("HOLDFAST_REST_NAMES", "")),
        )


def _rdma_devices(text: str) -> tuple[str, ...] | None:
    if text == "off":
        return None
    return () if text == "auto" else tuple(name.strip() for name in text.split(","))


def _replicate_bytes_per_s(environ: Mapping[str, str]) -> int:
    """Return the rate for copies; one at which there would never be a copy is refused."""
    name = "HOLDFAST_REPLICATE_RATE"
    rate = env.rate(environ, name, 0)
    if 0 < rate < REPLICATE_BYTES_PER_S_MIN:
        least = format_bytes(REPLICATE_BYTES_PER_S_MIN)
        raise InvalidRequestError(
            f"{name}={environ[name]!r} is less than {least} a second, at which no copy is ever "
            "whole in time: set it to more, or to 0 for no limit"
        )
    return rate


def _path(environ: Mapping[str, str], name: str, meaning: str) -> Path:
    return Path(env.required(environ, name, meaning)).absolute()


def default_budget_bytes(folder: Path) -> int:
    """Return half of what the file system, or the control group if that is less, has free.

    Slots that are there already count as free: they are reused.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    return int((free_bytes(folder) + ours) * BUDGET_SHARE)
