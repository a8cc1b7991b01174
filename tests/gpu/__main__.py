"""``make gpu``: the tests that need a GPU, then what saves cost there; writes ``build/gpu.json``.

Exit code 0: all is well, or there is no GPU, which is said and leaves an empty list of records.
1: a test failed, a measurement did, or a figure misses its aim. All takes at most eight minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULT = Path("build/gpu.json")
ALL_S_MAX = 8 * 60.0
TESTS_S_MAX = 4 * 60.0


def main() -> int:
    """Test, then measure; return the exit code."""
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text("[]\n", encoding="utf-8")
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip or "none: a build for CPUs"
        print(f"No GPU here (torch {torch.__version__}, CUDA {build}): nothing was tested and")
        print("nothing was measured on one. Run `make gpu` on a machine that has one.")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    started_s = time.monotonic()
    files = [str(path) for path in sorted(HERE.glob("on_cuda*.py"))]
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    failed = _failed("tests", tests, TESTS_S_MAX)
    left_s = ALL_S_MAX - (time.monotonic() - started_s)
    measures = [sys.executable, "-W", "ignore", "-m", "tests.gpu.measures", str(RESULT)]
    failed |= _failed("measurements", measures, left_s)
    for record in json.loads(RESULT.read_text(encoding="utf-8"))[1:]:
        print(_line(record))
        failed |= not record["met"]
    return int(failed)


def _line(record: dict[str, Any]) -> str:
    figure = f"{record['name']}: {record['value']:.4g} {record['unit']}"
    aim = f"; aim {record['target']}: {'met' if record['met'] else 'MISSED'}"
    return (
        f"{figure}, ratio {record['ratio']:.3g}{aim if record['target'] else ''}; {record['note']}"
    )


def _failed(what: str, command: list[str], limit_s: float) -> bool:
    try:
        return subprocess.run(command, timeout=limit_s, check=False).returncode != 0
    except subprocess.TimeoutExpired:
        print(f"the {what} took longer than {limit_s:.0f} s", file=sys.stderr)
        return True


if __name__ == "__main__":
    sys.exit(main())
