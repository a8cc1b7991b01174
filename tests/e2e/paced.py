"""Runs a script with a pause after each step of an optimizer: ``paced.py HURRY SCRIPT ...``.

After some steps pauses are long, until the file ``HURRY`` exists: who watches it is slow at times.
"""

import itertools
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

STEP_S, LATE_STEP_S = 0.1, 2.0
EARLY_COUNT = 8


def main():
    hurry, count = Path(sys.argv[1]), itertools.count()

    def pause(*_):
        late = next(count) >= EARLY_COUNT
        deadline = time.monotonic() + (LATE_STEP_S if late else STEP_S)
        while time.monotonic() < deadline and not (late and hurry.exists()):
            time.sleep(STEP_S)

    register_optimizer_step_post_hook(pause)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
