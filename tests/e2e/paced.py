"""Runs a script with a pause after each step of an optimizer: ``paced.py HURRY SCRIPT ...``.

Without one once the file ``HURRY`` exists. The pace is even, as that of a training is: a step that
all ranks are told to save is so many steps ahead as their pace says.
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

STEP_S = 0.5


def main():
    hurry = Path(sys.argv[1])
    register_optimizer_step_post_hook(lambda *_: hurry.exists() or time.sleep(STEP_S))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
