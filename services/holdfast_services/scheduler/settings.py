"""Settings of the scheduler, all from the environment."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.ready import ready_file
from holdfast_services.kit.visitors import names
from holdfast_services.scheduler.loops.leader import ROUND_S
from holdfast_services.scheduler.planning import POLICIES, POLICY

REST_LISTEN = "127.0.0.1:7390"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``docs/reference/environment.md``. ``me`` is a name that no other process has."""

    database_url: str
    metadata_address: str
    me: str
    rest_listen: str = REST_LISTEN
    rest_names: frozenset[str] = frozenset()
    policy: str = POLICY
    quotas: Mapping[str, int] = field(default_factory=dict)
    round_s: float = ROUND_S
    ready_file: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say.

        Raises:
            InvalidRequestError: a variable is missing or not what it should be; names it.
        """
        policy = environ.get("HOLDFAST_POLICY") or POLICY
        if policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise InvalidRequestError(f"HOLDFAST_POLICY={policy[:40]!r} is none of {known}")
        return cls(
            database_url=env.required(
                environ,
                "HOLDFAST_DATABASE_URL",
                "sqlite:////absolute/path.db or postgresql+psycopg://user@host/database",
            ),
            metadata_address=env.required(
                environ, "HOLDFAST_ADDRESS", "host:port of the metadata service"
            ),
            me=f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}",
            rest_listen=environ.get("HOLDFAST_REST_LISTEN", REST_LISTEN),
            rest_names=names(environ.get("HOLDFAST_REST_NAMES", "")),
            policy=policy,
            quotas=_quotas(environ.get("HOLDFAST_QUOTAS", "")),
            round_s=env.seconds(environ, "HOLDFAST_PLAN_S", ROUND_S),
            ready_file=ready_file(environ),
        )


def _quotas(text: str) -> dict[str, int]:
    """Return the quotas of ``ada=8,bob=16``.

    Raises:
        InvalidRequestError: it is something else.
    """
    found = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        owner, equals, gpus = entry.rpartition("=")
        if not (equals and owner and gpus.isascii() and gpus.isdigit() and len(gpus) <= 6):
            raise InvalidRequestError(
                f"HOLDFAST_QUOTAS: {entry[:40]!r} is not OWNER=GPUS, as in ada=8,bob=16"
            )
        found[owner] = int(gpus)
    return found
