"""Settings of the metadata service, all from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.ready import ready_file
from holdfast_services.kit.visitors import names

NODE_LEASE_S = 5.0
DECIDE_WAIT_S = 10.0
LISTEN = "127.0.0.1:7300"
REST_LISTEN = "127.0.0.1:7380"
ORPHAN_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the service listens, where the catalogue is, how long it believes a silent node.

    ``store`` and ``queue`` are the object tier, both empty or both set. ``scrub_age_s`` 0: what
    lies there is read back only when somebody asks. ``rest_names``: what browsers know REST by.
    """

    database_url: str
    listen: str = LISTEN
    rest_listen: str = REST_LISTEN
    node_lease_s: float = NODE_LEASE_S
    decide_wait_s: float = DECIDE_WAIT_S
    ready_file: Path | None = None
    store: str = ""
    queue: str = ""
    orphan_age_s: float = ORPHAN_AGE_S
    scrub_age_s: float = 0.0
    rest_names: frozenset[str] = frozenset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say.

        Raises:
            InvalidRequestError: the database is not named, there is a store without a queue, or
                a number is not one.
        """
        url = env.required(
            environ,
            "HOLDFAST_DATABASE_URL",
            "sqlite:////absolute/path.db or postgresql+psycopg://user@host/database",
        )
        store, queue = environ.get("HOLDFAST_STORE", ""), environ.get("HOLDFAST_QUEUE", "")
        if store and not queue:
            raise InvalidRequestError(
                "HOLDFAST_STORE is set without HOLDFAST_QUEUE: redis://host:port/db or "
                "sqlite:////absolute/queue.db, the same as the persistence workers'"
            )
        return cls(
            database_url=url,
            listen=environ.get("HOLDFAST_LISTEN", LISTEN),
            rest_listen=environ.get("HOLDFAST_REST_LISTEN", REST_LISTEN),
            node_lease_s=env.seconds(environ, "HOLDFAST_NODE_LEASE_S", NODE_LEASE_S),
            decide_wait_s=env.seconds(environ, "HOLDFAST_DECIDE_WAIT_S", DECIDE_WAIT_S),
            ready_file=ready_file(environ),
            store=store,
            queue=queue,
            orphan_age_s=env.seconds(environ, "HOLDFAST_ORPHAN_AGE_S", ORPHAN_AGE_S),
            scrub_age_s=env.seconds(environ, "HOLDFAST_SCRUB_AGE_S", 0.0, zero=True),
            rest_names=names(environ.get("HOLDFAST_REST_NAMES", "")),
        )
