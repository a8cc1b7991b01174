"""``config``: the settings in force for the services of this machine, and where they come from."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from holdfast.cli.output import Report, Table
from holdfast.embedded import require_services
from holdfast.errors import InternalError, InvalidRequestError, OutcomeUnknownError

SERVICES = ("metadata", "agent", "persistence", "scheduler", "operator")
COLUMNS = ("service", "setting", "value", "from")
ASK_S_MAX = 60.0
NOT_SET = "not set"


def config(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Return what a service that is started here would be told; it fails if that is refused.

    Raises:
        InvalidRequestError: the services are not installed, or the file cannot be read.
    """
    found = told(args.service or "", environ)
    rows = tuple(
        (
            row["service"],
            row["name"],
            row["value"] or NOT_SET,
            row["from"] if row["value"] else "",
        )
        for row in found["settings"]
    )
    problems = found["problems"]
    return Report(data=found, text=[Table(COLUMNS, rows), *problems], failed=bool(problems))


def told(service: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return ``settings`` and ``problems`` of a service, empty: of all.

    The services know their settings: one of their modules is asked, in a process of its own.

    Raises:
        InvalidRequestError: the services are not installed, or the file cannot be read.
        OutcomeUnknownError: they do not say in time, as where the machine is overloaded.
    """
    require_services()
    command = [sys.executable, "-m", "holdfast_services.config"]
    command += [service] if service else []
    try:
        asked = subprocess.run(  # noqa: S603 - ours
            command, env=dict(environ), capture_output=True, text=True, timeout=ASK_S_MAX,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as cause:
        raise OutcomeUnknownError(f"the settings were not told within {ASK_S_MAX} s") from cause
    try:
        found: dict[str, Any] = json.loads(asked.stdout)
    except ValueError as cause:
        last = asked.stderr.strip().rpartition("\n")[2]
        raise InternalError(f"the settings were not told: {last[:200]}") from cause
    if "error" in found:
        raise InvalidRequestError(found["error"])
    return found
