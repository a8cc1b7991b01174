"""Settings of the metadata service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.settings import (
    NEEDED,
    READY,
    TraceSettings,
    load,
    path,
    required,
    setting,
    text,
)
from holdfast_services.kit.visitors import read_names

NODE_LEASE_S = 5.0
DECIDE_WAIT_S = 10.0
LISTEN = "127.0.0.1:7300"
REST_LISTEN = "127.0.0.1:7380"
ORPHAN_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(TraceSettings):
    """Where the service listens, where the catalogue is, how long it believes a silent node.

    ``store`` and ``queue`` are the object tier, both empty or both set. ``scrub_age_s`` 0: what
    lies there is read back only when somebody asks. ``rest_names``: what browsers know REST by.
    """

    database_url: str = setting(
        "HOLDFAST_DATABASE_URL",
        required("sqlite:////absolute/path.db or postgresql+psycopg://user@host/database"),
        "`sqlite:////abs/path.db` or `postgresql+psycopg://…`",
        NEEDED,
    )
    listen: str = setting("HOLDFAST_LISTEN", text(LISTEN), "`host:port` for gRPC", f"`{LISTEN}`")
    rest_listen: str = setting(
        "HOLDFAST_REST_LISTEN",
        text(REST_LISTEN),
        "`host:port` for REST and the dashboard",
        f"`{REST_LISTEN}`",
    )
    rest_names: frozenset[str] = setting(
        "HOLDFAST_REST_NAMES",
        read_names,
        "other host names by which browsers reach REST, such as that of a proxy, separated by "
        "commas; [why](rest.md)",
    )
    node_lease_s: float = setting(
        "HOLDFAST_NODE_LEASE_S",
        partial(env.seconds, otherwise=NODE_LEASE_S),
        "seconds without a report after which a node, or a launcher of `holdfast run`, counts as "
        "lost",
        f"{NODE_LEASE_S:.0f}",
    )
    decide_wait_s: float = setting(
        "HOLDFAST_DECIDE_WAIT_S",
        partial(env.seconds, otherwise=DECIDE_WAIT_S),
        "seconds that a restore waits at most for the agents' first reports, and for a node that "
        "holds a needed shard and has stopped reporting",
        f"{DECIDE_WAIT_S:.0f}",
    )
    store: str = setting(
        "HOLDFAST_STORE",
        text(),
        "the object store, as for agents; needs `HOLDFAST_QUEUE`. Without it, no checkpoint "
        "becomes durable",
        NEEDED,
    )
    queue: str = setting(
        "HOLDFAST_QUEUE",
        text(),
        "queue with the work of persistence workers; the same value as theirs",
        NEEDED,
    )
    orphan_age_s: float = setting(
        "HOLDFAST_ORPHAN_AGE_S",
        partial(env.seconds, otherwise=ORPHAN_AGE_S),
        "age in seconds at which objects that belong to no checkpoint are deleted from the store",
        f"{ORPHAN_AGE_S:.0f}",
    )
    scrub_age_s: float = setting(
        "HOLDFAST_SCRUB_AGE_S",
        partial(env.seconds, otherwise=0.0, zero=True),
        "seconds after which the stored bytes of a durable checkpoint are checked again; 0: only "
        "by `holdfast scrub`",
        "0",
    )
    ready_file: Path | None = setting("HOLDFAST_READY_FILE", path, READY)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say, and the file that one names.

        Raises:
            InvalidRequestError: the database is not named, there is a store without a queue, or
                a number is not one.
        """
        made = load(cls, environ, "metadata")
        if made.store and not made.queue:
            raise InvalidRequestError(
                "HOLDFAST_STORE is set without HOLDFAST_QUEUE: redis://host:port/db or "
                "sqlite:////absolute/queue.db, the same as the persistence workers'"
            )
        return made
