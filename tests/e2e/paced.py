"""Runs a script with a pause after each optimizer step: ``paced.py SECONDS HURRY SCRIPT ...``.

Without one once the file ``HURRY`` exists. The pace is even, as that of a training is: a step that
all ranks are told to save is so many steps ahead as their pace says.
"""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main():
    pause_s, hurry = float(sys.argv[1]), Path(sys.argv[2])
    register_optimizer_step_post_hook(lambda *_: hurry.exists() or time.sleep(pause_s))
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
