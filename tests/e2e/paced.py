"""Runs a script with a pause after each optimizer step: ``paced.py SECONDS HURRY SCRIPT ...``.

Without one once the file ``HURRY`` exists. The pace is even, as that of a training is: a step that
all ranks are told to save is so many steps ahead as their pace says. After ``EVEN_COUNT`` steps of
a process it is a tenth of that: who is to be killed, also once more, must not be done before,
however late the others are.
"""

import itertools
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

EVEN_COUNT = 10


def main():
    pause_s, hurry = float(sys.argv[1]), Path(sys.argv[2])
    steps = itertools.count(1)

    def pause(*_: object) -> None:
        factor = 1 if next(steps) <= EVEN_COUNT else 10
        if not hurry.exists():
            time.sleep(factor * pause_s)

    register_optimizer_step_post_hook(pause)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
