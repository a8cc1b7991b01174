"""Settings of the metadata service, all from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidRequestError

NODE_LEASE_S = 5.0
DECIDE_WAIT_S = 10.0
LISTEN = "127.0.0.1:7300"
REST_LISTEN = "127.0.0.1:7380"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the service listens, where the catalogue is, how long it believes a silent node."""

    database_url: str
    listen: str = LISTEN
    rest_listen: str = REST_LISTEN
    node_lease_s: float = NODE_LEASE_S
    decide_wait_s: float = DECIDE_WAIT_S
    ready_file: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say.

        Raises:
            InvalidRequestError: the database is not named, or a number is not one.
        """
        url = environ.get("HOLDFAST_DATABASE_URL")
        if not url:
            raise InvalidRequestError(
                "HOLDFAST_DATABASE_URL is not set: sqlite:////absolute/path.db or "
                "postgresql+psycopg://user@host/database"
            )
        ready = environ.get("HOLDFAST_READY_FILE")
        return cls(
            database_url=url,
            listen=environ.get("HOLDFAST_LISTEN", LISTEN),
            rest_listen=environ.get("HOLDFAST_REST_LISTEN", REST_LISTEN),
            node_lease_s=_seconds(environ, "HOLDFAST_NODE_LEASE_S", NODE_LEASE_S),
            decide_wait_s=_seconds(environ, "HOLDFAST_DECIDE_WAIT_S", DECIDE_WAIT_S),
            ready_file=Path(ready) if ready else None,
        )


def _seconds(environ: Mapping[str, str], name: str, otherwise: float) -> float:
    text = environ.get(name)
    if not text:
        return otherwise
    try:
        value = float(text)
    except ValueError as cause:
        raise InvalidRequestError(f"{name}={text!r} is not a number of seconds") from cause
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"{name}={text!r} must be more than 0 seconds")
    return value


def host_port(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; port 0 means any free one.

    Raises:
        InvalidRequestError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"address {text!r} is not host:port")
    return host, int(port)
