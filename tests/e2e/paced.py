"""Runs a script with a pause after each step of an optimizer: ``paced.py SCRIPT ...``."""

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

STEP_S = 0.1


def main():
    register_optimizer_step_post_hook(lambda *_: time.sleep(STEP_S))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
