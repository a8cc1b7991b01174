"""``python -m holdfast_services.config [SERVICE]``: what is in force, as JSON.

With ``--page FILE`` it writes the tables of the services into the page instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import CheckpointError
from holdfast_services.config.in_force import in_force
from holdfast_services.config.models import MODELS
from holdfast_services.config.page import replaced


def main(arguments: Sequence[str]) -> int:
    """Print what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_services.config")
    parser.add_argument("service", nargs="?", choices=sorted(MODELS), help="default: all")
    parser.add_argument("--page", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if args.page:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(replaced(page), encoding="utf-8")
        return 0
    services = [args.service] if args.service else list(MODELS)
    try:
        print(json.dumps(in_force(services, os.environ)))  # noqa: T201 - what it is for
    except CheckpointError as error:
        print(json.dumps({"error": error.message}))  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
