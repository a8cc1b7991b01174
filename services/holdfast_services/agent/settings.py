"""Settings of an agent."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.core import env
from holdfast.core.byte_sizes import format_bytes
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.free_memory import free_bytes
from holdfast_services.kit.settings import (
    NEEDED,
    READY,
    MetricsSettings,
    Read,
    load,
    node_called,
    path,
    required,
    setting,
    text,
)

BUDGET_SHARE = 0.5
LISTEN_HOST = "127.0.0.1"
REPLICATE_BYTES_PER_S_MIN = 1 << 20
"""Slower than this a part of 16 MiB takes longer than steps that are saved are apart."""


def _required_path(meaning: str) -> Read:
    return lambda environ, name: Path(env.required(environ, name, meaning)).absolute()


def _rdma_devices(environ: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    said = environ.get(name) or "auto"
    if said == "off":
        return None
    return () if said == "auto" else tuple(each.strip() for each in said.split(","))


def _replicate_bytes_per_s(environ: Mapping[str, str], name: str) -> int:
    """Return the rate for copies; one at which there would never be a copy is refused."""
    rate = env.rate(environ, name, 0)
    if 0 < rate < REPLICATE_BYTES_PER_S_MIN:
        least = format_bytes(REPLICATE_BYTES_PER_S_MIN)
        raise InvalidRequestError(
            f"{name}={environ[name]!r} is less than {least} a second, at which no copy is ever "
            "whole in time: set it to more, or to 0 for no limit"
        )
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(MetricsSettings):
    """``budget_bytes`` 0: choose by free space.

    ``store`` empty: no object tier. It is opened when a restore first needs it. ``rdma_devices``
    empty: all that there are; None: no RDMA. ``replicate_bytes_per_s`` 0: no limit.
    ``metrics_listen`` empty: no ``/metrics``; ``rest_names``: what browsers know it by.
    """

    node: str = setting(
        "HOLDFAST_NODE",
        node_called(socket.gethostname),
        "unique name of this node",
        "the host name",
    )
    metadata_address: str = setting(
        "HOLDFAST_ADDRESS",
        required("host:port of the metadata service"),
        "metadata service, `host:port`",
        NEEDED,
    )
    agent_socket: Path = setting(
        "HOLDFAST_AGENT",
        _required_path("the path of its socket"),
        "unix socket to serve trainers on; the kernel takes paths up to 107 bytes",
        NEEDED,
    )
    arena: Path = setting(
        "HOLDFAST_ARENA",
        _required_path("a folder in memory"),
        "folder on a tmpfs for the slots; the agent makes it with mode 0700. A stack "
        "(`holdfast up`) gives each of its agents a folder of its own in `/dev/shm` instead",
        NEEDED,
    )
    budget_bytes: int = setting(
        "HOLDFAST_BUDGET",
        partial(env.size, otherwise=0),
        "most bytes that the slots may use",
        "half of the free space of the file system, or of the cgroup's memory limit if that is "
        "less",
    )
    listen_host: str = setting(
        "HOLDFAST_LISTEN_HOST",
        text(LISTEN_HOST),
        "address at which other nodes reach this agent",
        f"`{LISTEN_HOST}`",
    )
    rpc_port: int = setting("HOLDFAST_RPC_PORT", env.port, "port for gRPC between agents", "0")
    data_port: int = setting("HOLDFAST_DATA_PORT", env.port, "port for the transfer of shards", "0")
    rdma_devices: tuple[str, ...] | None = setting(
        "HOLDFAST_RDMA",
        _rdma_devices,
        "RDMA devices to [use](../howto/rdma.md), such as `mlx5_0,mlx5_1`; `auto`: all that can "
        "be used; `off`: none",
        "`auto`",
    )
    rdma_port: int = setting(
        "HOLDFAST_RDMA_PORT", env.port, "TCP port for control connections of RDMA", "0"
    )
    replicate_bytes_per_s: int = setting(
        "HOLDFAST_REPLICATE_RATE",
        _replicate_bytes_per_s,
        "most bytes per second that this node receives for copies and parity, such as `500MiB`, "
        "at least `1MiB`; 0: no limit. Not kept while a restore waits for bytes here. "
        "[How much it must be](../howto/choose-redundancy.md#leave-the-network-to-training)",
        "0",
    )
    domain: str = setting(
        "HOLDFAST_DOMAIN",
        text(),
        "failure domain, such as the name of the rack; empty: the node fails independently",
        "empty",
    )
    store: str = setting(
        "HOLDFAST_STORE",
        text(),
        "the object store to restore from: `file:///abs/folder` or "
        "`s3://bucket[/prefix][?endpoint=…&region=…&addressing=…&ca=…]`; the same for all "
        "services. The agent opens it when a restore first needs it",
    )
    ready_file: Path | None = setting("HOLDFAST_READY_FILE", path, READY)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings of ``environ``, and of the file that it names.

        Raises:
            InvalidRequestError: a setting is missing or not what it should be; names it.
        """
        return load(cls, environ, "agent")


def default_budget_bytes(folder: Path) -> int:
    """Return half of what the file system, or the control group if that is less, has free.

    Slots that are there already count as free: they are reused.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    return int((free_bytes(folder) + ours) * BUDGET_SHARE)
