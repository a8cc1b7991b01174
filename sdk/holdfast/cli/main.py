"""``holdfast``: reads the command line, runs one command, prints its report or its error.

Exit codes: 0, 1 the command failed, 2 the command line is wrong; 128 and the signal's number if an
export was stopped by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from holdfast.cli.arguments import parse
from holdfast.cli.output import Report, print_report
from holdfast.cli.stopping import EXIT_SIGNAL
from holdfast.core.text import shown
from holdfast.errors import CheckpointError, StoppedError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    args = parse(argv)
    try:
        report: Report = args.command(args, _environ(args))
        print_report(report, as_json=args.json, out=sys.stdout)
        sys.stdout.flush()
    except StoppedError as error:
        _print_error(error, as_json=args.json)
        return EXIT_SIGNAL + int(error.context.get("signal", 0))
    except CheckpointError as error:
        _print_error(error, as_json=args.json)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has gone, e.g. `| head`; without this Python complains when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_FAILED
    return EXIT_FAILED if report.failed else EXIT_OK


def _environ(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment, in which ``--dir`` names the stack and nothing else does."""
    environ = dict(os.environ)
    if args.dir:
        environ["HOLDFAST_HOME"] = str(args.dir)
        environ.pop("HOLDFAST_ADDRESS", None)
    return environ


def _print_error(error: CheckpointError, *, as_json: bool) -> None:
    """Print one line that says what is wrong and what to do."""
    line = " ".join(str(error).split())
    if as_json:
        record = {
            "kind": error.kind,
            "message": line,
            "context": error.context,
            "docs": error.docs,
        }
        print(json.dumps({"error": record}), file=sys.stderr)
    else:
        print(f"holdfast: {shown(line)}; see {error.docs}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
