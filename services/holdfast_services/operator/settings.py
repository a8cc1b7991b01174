"""Settings of the operator, all from the environment."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.ready import ready_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``docs/reference/environment.md``. ``kubernetes`` empty: by account or kubeconfig."""

    scheduler: str
    kubernetes: str = ""
    ready_file: Path | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say.

        Raises:
            InvalidRequestError: a variable is missing or not what it should be; names it.
        """
        env.required(environ, "HOLDFAST_SCHEDULER", "http://host:port of the scheduler")
        return cls(
            scheduler=_url(environ, "HOLDFAST_SCHEDULER"),
            kubernetes=_url(environ, "HOLDFAST_KUBERNETES"),
            ready_file=ready_file(environ),
        )


def _url(environ: Mapping[str, str], name: str) -> str:
    """Return a web address without its last slash; empty: the variable is not set."""
    text = environ.get(name, "")
    parsed = urllib.parse.urlsplit(text)
    if text and not (parsed.scheme in ("http", "https") and parsed.hostname):
        raise InvalidRequestError(f"{name}={text[:80]!r} is no http://host:port")
    return text.rstrip("/")
