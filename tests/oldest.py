"""Prints the oldest releases that pyproject.toml allows, one a line, for the extras that are named.

`make test-pins` names the services alone, which need neither torch nor numpy: that is a test, too.
`make test-pins-torch` names what a training has.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("httpx", "hypothesis", "moto", "pytest")
"""What the tests themselves need, in the newest release: their age is no promise to users."""


def oldest(requirement: str) -> str:
    """Return ``name[extra]==lower`` of ``name[extra]>=lower,<upper``."""
    parts = re.fullmatch(r"([\w.-]+(?:\[[\w,]+\])?)>=([\d.]+)(?:,.*)?", requirement)
    if parts is None:
        raise SystemExit(f"{requirement!r} in pyproject.toml names no lower bound; give it one")
    return f"{parts[1]}=={parts[2]}"


def requirements(*wanted: str) -> list[str]:
    """Return what to install: lower bounds of the extras, and the tests' tools as they come.

    boto3 comes with moto and fits one botocore only: unnamed, pip would try hundreds.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [one for extra in wanted for one in extras[extra]]
    pins = [oldest(one) for one in (*project["dependencies"], *named)]
    boto3 = [pin.replace("botocore", "boto3") for pin in pins if pin.startswith("botocore==")]
    tools = [one for one in extras["dev"] if one.startswith(TOOLS)]
    return [*pins, *boto3, *tools]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(*sys.argv[1:])) + "\n")
