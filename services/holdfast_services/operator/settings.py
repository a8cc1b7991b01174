"""Settings of the operator."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core import env
from holdfast.errors import InvalidRequestError
from holdfast_services.kit.masking import masked
from holdfast_services.kit.settings import NEEDED, READY, load, path, setting


def _url(environ: Mapping[str, str], name: str) -> str:
    """Return a web address without its last slash; empty: the variable is not set."""
    text = environ.get(name, "")
    try:
        parsed = urllib.parse.urlsplit(text)
        is_one = parsed.scheme in ("http", "https") and bool(parsed.hostname)
    except ValueError:  # a bracket of an address that is left open
        is_one = False
    if text and not is_one:
        raise InvalidRequestError(f"{name}={masked(text)[:80]!r} is no http://host:port")
    return text.rstrip("/")


def _scheduler(environ: Mapping[str, str], name: str) -> str:
    env.required(environ, name, "http://host:port of the scheduler")
    return _url(environ, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``kubernetes`` empty: by account or kubeconfig."""

    scheduler: str = setting(
        "HOLDFAST_SCHEDULER", _scheduler, "scheduler, `http://host:port`", NEEDED
    )
    kubernetes: str = setting(
        "HOLDFAST_KUBERNETES",
        _url,
        "the API server where it asks for no credentials, such as `http://127.0.0.1:8001` of "
        "`kubectl proxy`",
        "by the pod's service account, else by kubeconfig",
    )
    ready_file: Path | None = setting("HOLDFAST_READY_FILE", path, READY)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings that ``HOLDFAST_*`` variables say, and the file that one names.

        Raises:
            InvalidRequestError: a setting is missing or not what it should be; names it.
        """
        return load(cls, environ, "operator")
