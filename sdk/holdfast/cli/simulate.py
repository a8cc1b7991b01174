"""``simulate``: what the scheduler would do with the jobs of a trace, in a process of its own.

The rules are those of the scheduler service; nothing of them is in the SDK, so the process is asked
and tells, line by line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.cli.output import Report, Table, progress
from holdfast.embedded import require_services
from holdfast.errors import CheckpointError, InternalError, InvalidRequestError, NotFoundError

Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]

POLICIES = ("price", "pollux", "sia", "fifo")
_KINDS: Mapping[str, type[CheckpointError]] = {
    kind.kind: kind for kind in (InvalidRequestError, NotFoundError)
}


def simulate(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Simulate, and print a row for each policy.

    Raises:
        InvalidRequestError: the trace is not as its format says, or something is not installed.
        NotFoundError: there is no such trace.
        InternalError: the simulation failed; says how.
    """
    require_services()
    missing = [name for name in ("numpy", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequestError(
            f"the simulator needs {' and '.join(missing)}: pip install holdfast[services,elastic]"
        )
    # One core: what the libraries would share out over several is too small for that.
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "holdfast_services.scheduler.simulator"]
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environ, **alone},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        json.dump(_asked(args), process.stdin)
        process.stdin.close()
        found = _result(process)
    text: list[str | Table] = [
        Table(tuple(found["columns"]), tuple(tuple(row) for row in found["rows"])),
        *(f"written: {path}" for path in found["files"]),
    ]
    return Report(data={"runs": found["runs"], "files": found["files"]}, text=text)


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "trace": args.trace,
        "traces": args.traces,
        "keep": args.keep,
        "policies": _policies(args),
        "out": _absolute(args.out),
        "html": _absolute(args.html),
        "scenario": {
            "nodes": args.nodes,
            "gpus_per_node": args.gpus,
            "round_s": args.round_s,
            "restart_s": args.restart_s,
            "seed": args.seed,
            "history": args.history,
            "declares": not args.undeclared,
            "wrong_by": args.wrong_by,
            "at_once": args.at_once,
            "noise": args.noise,
            "outliers": args.outliers,
            "mtbf_s": args.mtbf_s,
            "spot_nodes": args.spot_nodes,
            "spot_mtbf_s": args.spot_mtbf_s,
        },
    }


def _policies(args: argparse.Namespace) -> list[str]:
    return list(POLICIES) if args.compare else list(dict.fromkeys(args.policy or POLICIES[:1]))


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).expanduser().resolve())


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    first = json.loads(process.stdout.readline() or "{}")
    with progress("simulating", first.get("jobs", 0)) as advance:
        for line in [json.dumps(first)] if "jobs" not in first else process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "ended" in said:
                advance()
            elif "error" in said:
                kind = _KINDS.get(said["error"]["kind"], InternalError)
                raise kind(said["error"]["message"])
            elif "result" in said:
                result: dict[str, Any] = said["result"]
                return result
    raise InternalError(f"the simulation ended with {process.wait()} and no result")
