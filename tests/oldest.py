"""Prints the oldest releases that pyproject.toml allows, one a line, for `make test-pins`.

Services need neither torch nor numpy, so this environment has neither: that is a test, too.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = [
    "httpx",
    "hypothesis",
    "moto",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
]
"""What the tests themselves need, in the newest release: their age is no promise to users."""


def oldest(requirement: str) -> str:
    """Return ``name[extra]==lower`` of ``name[extra]>=lower,<upper``."""
    parts = re.fullmatch(r"([\w.-]+(?:\[[\w,]+\])?)>=([\d.]+)(?:,.*)?", requirement)
    if parts is None:
        raise SystemExit(f"{requirement!r} in pyproject.toml names no lower bound; give it one")
    return f"{parts[1]}=={parts[2]}"


def requirements() -> list[str]:
    """Return what to install: lower bounds of the services, and the tests' tools as they come.

    boto3 comes with moto and fits one botocore only: unnamed, pip would try hundreds.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = [oldest(one) for one in (*project["dependencies"], *extras["services"])]
    boto3 = [pin.replace("botocore", "boto3") for pin in pins if pin.startswith("botocore==")]
    tools = [one for one in extras["dev"] if one.startswith(TOOLS)]
    return [*pins, *boto3, *tools]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements()) + "\n")
