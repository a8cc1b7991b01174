"""A rank under ``--auto``: ``JOB HANG_AT SCRIPT ...``; it hangs before that step."""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import auto


def main():
    job, hang_at, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    steps = 0

    def hang(*_):
        nonlocal steps
        steps += 1
        if steps == hang_at:
            print("hangs", flush=True)
            signal.pause()

    # As under `holdfast run`, which frameworks look for.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], TORCHELASTIC_RUN_ID=job)
    register_optimizer_step_pre_hook(hang)
    auto.install(job)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
