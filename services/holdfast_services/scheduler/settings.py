"""Settings of the scheduler."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.settings import NEEDED, READY, load, path, required, setting, text
from holdfast_services.kit.visitors import read_names
from holdfast_services.scheduler.loops.leader import ROUND_S
from holdfast_services.scheduler.planning import POLICIES, POLICY

REST_LISTEN = "127.0.0.1:7390"


def _policy(environ: Mapping[str, str], name: str) -> str:
    policy = environ.get(name) or POLICY
    if policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise InvalidRequestError(f"{name}={policy[:40]!r} is none of {known}")
    return policy


def _quotas(environ: Mapping[str, str], name: str) -> dict[str, int]:
    """Return the quotas of ``ada=8,bob=16``.

    Raises:
        InvalidRequestError: it is something else.
    """
    found = {}
    said = environ.get(name, "").split(",")
    for entry in filter(None, (entry.strip() for entry in said)):
        owner, equals, gpus = entry.rpartition("=")
        if not (equals and owner and gpus.isascii() and gpus.isdigit() and len(gpus) <= 6):
            raise InvalidRequestError(
                f"{name}: {entry[:40]!r} is not OWNER=GPUS, as in ada=8,bob=16"
            )
        found[owner] = int(gpus)
    return found


def _own_name() -> str:
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``me`` is a name that no other process has, and no setting."""

    database_url: str = setting(
        "HOLDFAST_DATABASE_URL",
        required("sqlite:////absolute/path.db or postgresql+psycopg://user@host/database"),
        "as for the metadata service; it may be the same database",
        NEEDED,
    )
    metadata_address: str = setting(
        "HOLDFAST_ADDRESS",
        required("host:port of the metadata service"),
        "metadata service, `host:port`",
        NEEDED,
    )
    rest_listen: str = setting(
        "HOLDFAST_REST_LISTEN",
        text(REST_LISTEN),
        "`host:port` for REST and the page",
        f"`{REST_LISTEN}`",
    )
    rest_names: frozenset[str] = setting(
        "HOLDFAST_REST_NAMES",
        read_names,
        "other host names by which browsers reach it, as for the metadata service",
    )
    policy: str = setting(
        "HOLDFAST_POLICY",
        _policy,
        "who gets which GPUs: `price`, `fifo`, `pollux` or `sia`",
        f"`{POLICY}`",
    )
    quotas: Mapping[str, int] = setting(
        "HOLDFAST_QUOTAS",
        _quotas,
        "most GPUs of all jobs of an owner together, such as `ada=8,bob=16`",
        "no bounds",
    )
    round_s: float = setting(
        "HOLDFAST_PLAN_S",
        partial(env.seconds, otherwise=ROUND_S),
        "a plan is made at least so often, in seconds, and at once when jobs or nodes come or go",
        f"{ROUND_S:.0f}",
    )
    ready_file: Path | None = setting("HOLDFAST_READY_FILE", path, READY)
    me: str = field(default_factory=_own_name)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say, and the file that one names.

        Raises:
            InvalidRequestError: a setting is missing or not what it should be; names it.
        """
        return load(cls, environ, "scheduler")
